"""Llama-like checkpoints, packed or plain, as the CUDA decoder takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trirun_kernels.decoder.cuda_weights import CudaLayer, CudaModel, cuda_layer, padded_head
from trirun_kernels.weights.names import (
    BIAS,
    FINAL_NORM,
    LAYER_LINEARS,
    LAYER_NORMS,
    SCALE,
    WEIGHT,
    embedding_names,
    layer_prefix,
    missing_in_a_layer,
)

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import QUANT_METHOD, Checkpoint
from ...errors import InputError
from ...models.llama_config import UnsupportedModel, gpu_decoder_shape, gpu_dtype, longest_context, rotary_angles


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    act_bits: int | None = None,
    context: int | None = None,
) -> CudaModel:
    """Copy a checkpoint to the GPU, q|k|v and gate|up fused where they can be.

    Args:
        dtype: "float16", "bfloat16", or "auto": the checkpoint's own, float16 for one in float32.
        act_bits: of packed weights, None takes the checkpoint's.
        context: positions that the rotary angles cover, None as many as the model attends to.

    Raises:
        UnsupportedModel: another family, or something that the decoder does not have.
        InputError: the checkpoint is damaged.
    """
    source = ModelDir(path)
    if source.quant_method == QUANT_METHOD:
        source = Checkpoint(path)
    elif source.quant_method is not None:
        raise UnsupportedModel(f"a model quantized by {source.quant_method!r}")
    config = source.config
    shape, longest = gpu_decoder_shape(config), longest_context(config)
    if lost := missing_in_a_layer(source, shape.layers):
        raise UnsupportedModel(f"there is no tensor {lost}, which other layers have")
    kind = getattr(torch, gpu_dtype(config, dtype))
    bits = act_bits or (source.format.activation_bits if isinstance(source, Checkpoint) else 16)
    layers = [_layer(source, layer_prefix(i), device, kind, bits) for i in range(shape.layers)]
    names = embedding_names(config, source)
    embedding = source.tensor(names[0]).to(device, kind)
    head = embedding if names[1] == names[0] else source.tensor(names[1]).to(device, kind)
    for name, tensor in zip(names, (embedding, head), strict=True):
        if tuple(tensor.shape) != (shape.vocab, shape.hidden):
            raise InputError(f"{path}: {name} is {list(tensor.shape)}, config.json says {[shape.vocab, shape.hidden]}")
    positions = min(longest, context or longest)
    angles = rotary_angles(config, -(-positions // 64) * 64)
    cosines, sines = (torch.from_numpy(part).to(device) for part in angles)
    final_norm = source.tensor(FINAL_NORM).float().to(device)
    return CudaModel(shape, layers, embedding, padded_head(head), final_norm, cosines, sines, bits)


def _layer(source: ModelDir, prefix: str, device: torch.device, dtype: torch.dtype, act_bits: int) -> CudaLayer:
    needed = [module + WEIGHT for module in LAYER_LINEARS.values()]
    needed += [LAYER_NORMS["attention_norm"], LAYER_NORMS["mlp_norm"]]
    if lost := [name for name in needed if prefix + name not in source]:
        raise UnsupportedModel(f"there is no tensor {prefix}{lost[0]}")
    weights: dict[str, Any] = {}
    biases: dict[str, Any] = {}
    for name, within in LAYER_LINEARS.items():
        module = prefix + within
        if isinstance(source, Checkpoint) and module + SCALE in source:
            weights[name] = source.packed(module)
        else:
            weights[name] = source.tensor(module + WEIGHT)
        if module + BIAS in source:
            biases[name] = source.tensor(module + BIAS)
    norms = {name: source.tensor(prefix + tensor) for name, tensor in LAYER_NORMS.items() if prefix + tensor in source}
    return cuda_layer(weights, biases, norms, device, dtype, act_bits)
