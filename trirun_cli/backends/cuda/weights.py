"""Checkpoints, packed or plain, as the CUDA decoder takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trirun_kernels.decoder.cuda_experts import CudaMixture
from trirun_kernels.decoder.cuda_weights import (
    CudaInputs,
    CudaLayer,
    CudaModel,
    cuda_layer,
    delta_heads,
    head_projection,
    on_device,
)
from trirun_kernels.decoder.shape import Attention, DecoderShape, GatedDelta, LayerShape, Mixture
from trirun_kernels.decoder.weights import InputWeights, vector_lengths
from trirun_kernels.weights.names import (
    BIAS,
    SCALE,
    WEIGHT,
    embedding_names,
    layer_prefix,
    missing_in_a_layer,
)
from trirun_kernels.weights.packing import PackedWeight, dequantize

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import QUANT_METHOD, Checkpoint
from ...errors import InputError
from ...models.description import (
    UnsupportedModel,
    description,
    gpu_decoder_shape,
    gpu_dtype,
    module_prefix,
    tensor_prefix,
)
from ...models.hybrids import delta_vectors, gate_rows
from ...models.parts import MixtureNames, TensorNames
from ...models.rotary import angles
from ...models.settings import text_settings
from ...models.vectors import final_norm, layer_vectors, router

PARTS = ("gate", "up", "down")  # of an expert
# What the decoder calls linears that a checkpoint joins.
FUSED = {("q", "k", "v"): "qkv", ("gate", "up"): "gate_up", ("q", "q_gate"): "q"}


def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    act_bits: int | None = None,
    context: int | None = None,
    int8_head: bool = False,
) -> CudaModel:
    """Copy a checkpoint to the GPU, q|k|v and gate|up fused where they can be.

    Args:
        dtype: "float16", "bfloat16", or "auto": the checkpoint's own, float16 for one in float32.
        act_bits: of packed weights, None takes the checkpoint's.
        context: positions that the rotary angles cover, None as many as the model attends to.
        int8_head: quantize the output head unless it is packed.

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
    shape, found, prefix = gpu_decoder_shape(config), description(config), tensor_prefix(source)
    kinds = [(type(layer.mixer), layer.mixer.shared_with is None) for layer in shape.layers]
    if lost := missing_in_a_layer(source, kinds, prefix):
        raise UnsupportedModel(f"there is no tensor {lost}, which other layers have")
    kind = getattr(torch, gpu_dtype(config, dtype))
    bits = act_bits or (source.format.activation_bits if isinstance(source, Checkpoint) else 16)
    modules_in = module_prefix(source, found.names.of(shape.layers[0]).modules()[0])
    layers = [
        _layer(
            source,
            found.names.of(layer),
            (layer_prefix(index, prefix), layer_prefix(index, modules_in)),
            layer,
            shape,
            device,
            kind,
            bits,
        )
        for index, layer in enumerate(shape.layers)
    ]
    names = embedding_names(text_settings(config), source, prefix)
    vocabulary = {name: on_device(_weight(source, name.removesuffix(WEIGHT)), device, kind) for name in set(names)}
    for name, weight in vocabulary.items():
        _expect(source, name, weight, (shape.vocab, shape.hidden))
    embedding, head = (vocabulary[name] for name in names)
    positions = -(-min(found.longest, context or found.longest) // 64) * 64
    rotary = []
    for settings, half in zip(found.rotary, shape.rotary_halves, strict=False):
        cosines, sines = (torch.from_numpy(part).to(device) for part in angles(settings, half, positions))
        rotary.append((cosines, sines))
    norm, offset = final_norm(source, found, prefix)
    bias = None if offset is None else torch.from_numpy(offset).to(device)
    last = torch.from_numpy(norm).to(device)
    own = _inputs(source, found.names, (prefix, modules_in), shape)
    inputs = None if own is None else CudaInputs.of(own, device, kind, bits)
    head = head_projection(head, int8=int8_head)
    return CudaModel(shape, layers, embedding, head, last, rotary, kind, bits, bias, inputs)


def _inputs(
    source: ModelDir, names: TensorNames, prefixes: tuple[str, str], shape: DecoderShape
) -> InputWeights | None:
    """What every layer's own input is made of, or None where there is none. ``prefixes``: as of :func:`_layer`, before
    the names of layers.

    Raises:
        UnsupportedModel: a tensor is not there. InputError: a size is not config.json's.
    """
    if shape.inputs is None:
        return None
    norm, width = prefixes[0] + names.inputs["norm"], len(shape.layers) * shape.inputs.size
    if norm not in source:
        raise UnsupportedModel(f"there is no tensor {norm}")
    sizes = {"table": (shape.inputs.vocab, width), "projection": (width, shape.hidden), "norm": (shape.inputs.size,)}
    modules = {part: _place(source, prefixes, names.inputs[part]) for part in ("table", "projection")}
    found: dict[str, Any] = {part: _weight(source, module) for part, module in modules.items()}
    found["norm"] = torch.from_numpy(source.floats(norm))
    for part, weight in found.items():
        _expect(source, names.inputs[part], weight, sizes[part])
    return InputWeights(**found)


def _expect(source: ModelDir, name: str, weight: PackedWeight | Tensor, size: tuple[int, ...]) -> None:
    found = (weight.n, weight.k) if isinstance(weight, PackedWeight) else tuple(weight.shape)
    if found != size:
        raise InputError(f"{source.path}: {name} is {list(found)}, config.json says {list(size)}")


def _layer(
    source: ModelDir,
    names: TensorNames,
    prefixes: tuple[str, str],
    layer: LayerShape,
    shape: DecoderShape,
    device: torch.device,
    dtype: torch.dtype,
    act_bits: int,
) -> CudaLayer:
    """``prefixes``: what names begin with, of vectors and unpacked modules, and of packed modules."""
    prefix = prefixes[0]
    joined = {field for parts in names.fused.values() for field in parts}
    modules = {field: names.linears[field] for field in layer.linear_sizes(shape.hidden) if field not in joined}
    modules |= {FUSED[parts]: module for module, parts in names.fused.items()}

    def dense(within: str) -> Tensor:
        found = _weight(source, _place(source, prefixes, within))
        return dequantize(found) if isinstance(found, PackedWeight) else found

    places = {name: _place(source, prefixes, module) for name, module in modules.items()}
    weights: dict[str, Any] = {name: _weight(source, place) for name, place in places.items()}
    stored = {name: prefix + module + BIAS for name, module in modules.items()}
    biases: dict[str, Any] = {name: source.tensor(bias) for name, bias in stored.items() if bias in source}
    mixer, delta = layer.mixer, None
    if isinstance(mixer, GatedDelta):
        gates = torch.cat(gate_rows(names, mixer, dense))
        own = delta_vectors(source, prefix, mixer)
        delta = delta_heads(mixer, gates, own, shape.norm_eps, device, dtype)
    elif mixer.gated:
        weights["q"], weights["q_gate"] = _gate_apart(weights["q"], mixer)
        if (bias := biases.get("q")) is not None:
            biases["q"], biases["q_gate"] = bias.view(mixer.heads, 2, -1).unbind(1)
            biases = {name: each.flatten() for name, each in biases.items()}
    vectors, mixture = layer_vectors(source, names, prefix, vector_lengths(layer, shape.hidden)), None
    if layer.mixture is not None:
        own = router(
            source, names.mixture, prefix, lambda within: dense(within).float().numpy(), vectors.get("mlp_norm")
        )
        mixture = _mixture(source, names.mixture, prefix, layer.mixture, own, device, dtype, act_bits)
    return cuda_layer(
        weights,
        biases,
        vectors,
        device,
        dtype,
        act_bits,
        delta,
        mixture,
    )


def _mixture(
    source: ModelDir,
    names: MixtureNames,
    prefix: str,
    mixture: Mixture,
    own: dict[str, np.ndarray],
    device: torch.device,
    dtype: torch.dtype,
    act_bits: int,
) -> CudaMixture:
    """``own``: of :func:`~trirun_cli.models.vectors.router`."""
    modules = [prefix + module for module in names.modules(mixture)]
    if not isinstance(source, Checkpoint) or (lost := [name for name in modules if name + SCALE not in source]):
        what = "experts" if not isinstance(source, Checkpoint) else lost[0]
        raise UnsupportedModel(f"{what} not packed: only packed experts run on the native decoder")
    weights = {part: [source.packed(name) for name in modules if name.endswith(f".{part}")] for part in PARTS}
    # One launch reads the gates and ups of all experts, and one all downs.
    for parts in (("gate", "up"), ("down",)):
        if len(grids := {weight.spec for part in parts for weight in weights[part]}) > 1:
            told = " and ".join(sorted(f"group size {grid.group_size}, zero {grid.zero}" for grid in grids))
            raise UnsupportedModel(f"{prefix}{names.experts}: {' and '.join(parts)} are on several grids ({told})")
    stored = [name + BIAS for name in modules]
    biases = {
        part: [source.tensor(name) if name in source else None for name in stored if name.endswith(f".{part}{BIAS}")]
        for part in PARTS
    }
    return CudaMixture.of(mixture, weights, biases, own, device, dtype, act_bits)


def _place(source: ModelDir, prefixes: tuple[str, str], within: str) -> str:
    """The name of a module, packed or not.

    Raises:
        UnsupportedModel: it is not there.
    """
    found = next((p + within for p in reversed(prefixes) if p + within + WEIGHT in source), None)
    if found is None:
        raise UnsupportedModel(f"there is no tensor {prefixes[0]}{within}{WEIGHT}")
    return found


def _weight(source: ModelDir, module: str) -> PackedWeight | Tensor:
    """A module's weight as the checkpoint has it."""
    if isinstance(source, Checkpoint) and module + SCALE in source:
        return source.packed(module)
    return source.tensor(module + WEIGHT)


def _gate_apart(weight: PackedWeight | Tensor, mixer: Attention) -> tuple[Any, Any]:
    """Queries and their gates from a weight in which they alternate, head by head.

    Raises:
        UnsupportedModel: a head ends within an n tile of a packed weight.
    """
    if isinstance(weight, Tensor):
        query, gate = weight.view(mixer.heads, 2, mixer.head_dim, -1).unbind(1)
        return query.flatten(0, 1), gate.flatten(0, 1)
    if mixer.head_dim % 64:
        raise UnsupportedModel(f"output gates of heads of {mixer.head_dim}, no whole n tiles of 64")
    words = weight.words.view(mixer.heads, 2, mixer.head_dim // 64, *weight.words.shape[1:])

    def part(which: int) -> PackedWeight:
        scales, zeros = (
            None if x is None else x.view(-1, mixer.heads, 2, mixer.head_dim)[:, :, which].flatten(1).contiguous()
            for x in (weight.scales, weight.zeros)
        )
        assert scales is not None
        rows = words[:, which].flatten(0, 1).contiguous()
        return PackedWeight(rows, scales, zeros, mixer.q_size, weight.k, weight.spec)

    return part(0), part(1)
