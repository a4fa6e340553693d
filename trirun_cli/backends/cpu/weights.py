"""Packed checkpoints of the Llama family as the native decoder of the CPU takes them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import padded_context, quantize_head
from trirun_kernels.decoder.weights import (
    DecoderShape,
    DecoderWeights,
    Int8Head,
    LayerWeights,
    Linear,
    PackedArrays,
)

from ...checkpoint.model_dir import weight_files
from ...checkpoint.reader import SCALE, WEIGHT, ZERO, Format
from ...errors import InputError
from ...models.llama_config import UnsupportedModel, decoder_shape, rotary_angles
from ...models.output_head import embedding_names
from ...models.stored_layers import check_layers_alike
from ..weight_memory import StoredTensors, WeightMemory

# The module of each linear and the tensor of each norm within model.layers.<i>.
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attention_sub_norm": "self_attn.attn_sub_norm.weight",
    "mlp_sub_norm": "mlp.ffn_sub_norm.weight",
}
FINAL_NORM = "model.norm.weight"
# Rows of the head that are converted at a time.
HEAD_ROWS = 256


def decoder_weights(
    path: Path, config: dict[str, Any], form: Format, context: int, *, int8_head: bool = True, threads: int = 1
) -> DecoderWeights:
    """The weights of a packed checkpoint as the native decoder takes them: packed tensors and an 8-bit head in large
    pages, the embedding in the mapped file, where only the rows of tokens that occur are ever read.

    Args:
        path: the checkpoint directory; config: its config.json; form: its quantization section.
        context: positions that the rotary angles cover, rounded up to the decoder's key block.
        int8_head: quantize the output head, with ``threads`` threads.

    Raises:
        UnsupportedModel, InputError: see :class:`~.decoder.NativeDecoder`.
    """
    shape, stored = decoder_shape(config), StoredTensors(weight_files(path))
    check_layers_alike(stored.names, shape.layers)
    bare = [f"model.layers.{i}.{name}" for i in range(shape.layers) for name in LINEARS.values()]
    if missing := [module for module in bare if module + SCALE not in stored]:
        raise UnsupportedModel(f"{missing[0]} is not packed ({len(missing)} of {len(bare)} linear layers are not)")
    embedding, head = embedding_names(config, stored)
    norms = [f"model.layers.{i}.{NORMS[name]}" for i in range(shape.layers) for name in ("attention_norm", "mlp_norm")]
    needed = [module + WEIGHT for module in bare] + [embedding, FINAL_NORM, *norms]
    if lost := [name for name in needed if name not in stored]:
        raise InputError(f"{path} holds no {lost[0]}")
    names = [module + part for module in bare for part in (WEIGHT, SCALE, ZERO) if module + part in stored]
    capacity = sum(WeightMemory.size(stored.nbytes(name)) for name in names)
    if int8_head:
        capacity += WeightMemory.size(shape.vocab * Int8Head.stride(shape.hidden))
    memory = WeightMemory(stored, capacity)
    cosines, sines = rotary_angles(config, padded_context(context))
    return DecoderWeights(
        shape,
        [_layer(stored, form, f"model.layers.{i}.", memory.tensor) for i in range(shape.layers)],
        stored.mapped(embedding),
        _int8_head(stored, head, memory, shape, threads) if int8_head else stored.mapped(head),
        stored.floats(FINAL_NORM),
        cosines,
        sines,
    )


def _int8_head(stored: StoredTensors, name: str, memory: WeightMemory, shape: DecoderShape, threads: int) -> Int8Head:
    """The head in 8 bits, converted a few rows at a time so that it is never in memory as it is in the file."""
    if stored.shape(name) != (shape.vocab, shape.hidden):
        raise InputError(f"{name} has shape {stored.shape(name)}, config.json says {(shape.vocab, shape.hidden)}")
    rows = memory.empty((shape.vocab, Int8Head.stride(shape.hidden)), "uint8")
    scales = Array.of(np.empty(shape.vocab, np.float32))
    row_bytes = stored.nbytes(name) // shape.vocab
    buffer = bytearray(min(HEAD_ROWS, shape.vocab) * row_bytes)
    for start in range(0, shape.vocab, HEAD_ROWS):
        count = min(HEAD_ROWS, shape.vocab - start)
        stored.read_into(name, memoryview(buffer)[: count * row_bytes], start * row_bytes)
        piece = Array.within(buffer, stored.dtype(name), (count, shape.hidden))
        quantize_head(piece, Int8Head(rows.rows(start, count), scales.rows(start, count), shape.hidden), threads)
    return Int8Head(rows, scales, shape.hidden)


def _layer(stored: StoredTensors, form: Format, prefix: str, read: Callable[[str], Array]) -> LayerWeights:
    def linear(name: str) -> Linear:
        module = prefix + name
        words = read(module + WEIGHT)
        if len(words.shape) != 3:
            raise InputError(f"{module}{WEIGHT} has shape {list(words.shape)}, not [n/64, k/32, 128]")
        n, k = form.padded.get(module) or (words.shape[0] * 64, words.shape[1] * 32)
        zeros = read(module + ZERO) if module + ZERO in stored else None
        weight = PackedArrays(words, read(module + SCALE), zeros, n, k, form.spec(module))
        bias = f"{module}.bias"
        return Linear(weight, stored.floats(bias) if bias in stored else None)

    parts: dict[str, Any] = {name: linear(module) for name, module in LINEARS.items()}
    parts |= {name: stored.floats(prefix + tensor) for name, tensor in NORMS.items() if prefix + tensor in stored}
    return LayerWeights(**parts)
