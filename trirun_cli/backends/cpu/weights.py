"""Packed checkpoints of the Llama family as the native decoder of the CPU takes them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
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
from trirun_kernels.weights.names import (
    BIAS,
    FINAL_NORM,
    LAYER_LINEARS,
    LAYER_NORMS,
    SCALE,
    WEIGHT,
    ZERO,
    embedding_names,
    layer_prefix,
    missing_in_a_layer,
)
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import Format
from ...errors import InputError
from ...models.llama_config import UnsupportedModel, decoder_shape, rotary_angles
from ..weight_memory import WeightMemory

# Rows of the head that are converted at a time.
HEAD_ROWS = 256


def decoder_weights(
    source: ModelDir, form: Format, context: int, *, int8_head: bool = True, threads: int = 1
) -> DecoderWeights:
    """The weights of a packed checkpoint as the native decoder takes them: packed tensors and an 8-bit head in large
    pages, the embedding in the mapped file, where only the rows of tokens that occur are ever read.

    Args:
        source: the checkpoint directory. form: the quantization section of its config.json.
        context: positions that the rotary angles cover, rounded up to the decoder's key block.
        int8_head: quantize the output head, with ``threads`` threads.

    Raises:
        UnsupportedModel, InputError: see :class:`~.decoder.NativeDecoder`.
    """
    config = source.config
    shape = decoder_shape(config)
    if lost_of_layer := missing_in_a_layer(source, shape.layers):
        raise UnsupportedModel(f"there is no tensor {lost_of_layer}, which other layers have")
    prefixes = [layer_prefix(i) for i in range(shape.layers)]
    bare = [prefix + name for prefix in prefixes for name in LAYER_LINEARS.values()]
    if missing := [module for module in bare if module + SCALE not in source]:
        raise UnsupportedModel(f"{missing[0]} is not packed ({len(missing)} of {len(bare)} linear layers are not)")
    embedding, head = embedding_names(config, source)
    norms = [prefix + LAYER_NORMS[name] for prefix in prefixes for name in ("attention_norm", "mlp_norm")]
    needed = [module + WEIGHT for module in bare] + [embedding, FINAL_NORM, *norms]
    if lost := [name for name in needed if name not in source]:
        raise InputError(f"{source.path} holds no {lost[0]}")
    names = [module + part for module in bare for part in (WEIGHT, SCALE, ZERO) if module + part in source]
    capacity = sum(WeightMemory.size(source[name].nbytes) for name in names)
    if int8_head:
        capacity += WeightMemory.size(shape.vocab * Int8Head.stride(shape.hidden))
    memory = WeightMemory(source, capacity)
    cosines, sines = rotary_angles(config, padded_context(context))
    return DecoderWeights(
        shape,
        [_layer(source, form, prefix, memory.tensor) for prefix in prefixes],
        source.mapped(embedding),
        _int8_head(source, head, memory, shape, threads) if int8_head else source.mapped(head),
        source.floats(FINAL_NORM),
        cosines,
        sines,
    )


def _int8_head(stored: SafetensorsDir, name: str, memory: WeightMemory, shape: DecoderShape, threads: int) -> Int8Head:
    """The head in 8 bits, converted a few rows at a time so that it is never in memory as it is in the file."""
    if stored[name].shape != (shape.vocab, shape.hidden):
        raise InputError(f"{name} has shape {stored[name].shape}, config.json says {(shape.vocab, shape.hidden)}")
    rows = memory.empty((shape.vocab, Int8Head.stride(shape.hidden)), "uint8")
    scales = Array.of(np.empty(shape.vocab, np.float32))
    row_bytes = stored[name].nbytes // shape.vocab
    buffer = bytearray(min(HEAD_ROWS, shape.vocab) * row_bytes)
    for start in range(0, shape.vocab, HEAD_ROWS):
        count = min(HEAD_ROWS, shape.vocab - start)
        stored.read_into(name, memoryview(buffer)[: count * row_bytes], start * row_bytes)
        piece = Array.within(buffer, stored.array_dtype(name), (count, shape.hidden))
        quantize_head(piece, Int8Head(rows.rows(start, count), scales.rows(start, count), shape.hidden), threads)
    return Int8Head(rows, scales, shape.hidden)


def _layer(stored: SafetensorsDir, form: Format, prefix: str, read: Callable[[str], Array]) -> LayerWeights:
    def linear(name: str) -> Linear:
        module = prefix + name
        words = read(module + WEIGHT)
        if len(words.shape) != 3:
            raise InputError(f"{module}{WEIGHT} has shape {list(words.shape)}, not [n/64, k/32, 128]")
        n, k = form.padded.get(module) or (words.shape[0] * 64, words.shape[1] * 32)
        zeros = read(module + ZERO) if module + ZERO in stored else None
        weight = PackedArrays(words, read(module + SCALE), zeros, n, k, form.spec(module))
        bias = module + BIAS
        return Linear(weight, stored.floats(bias) if bias in stored else None)

    parts: dict[str, Any] = {name: linear(module) for name, module in LAYER_LINEARS.items()}
    parts |= {name: stored.floats(prefix + tensor) for name, tensor in LAYER_NORMS.items() if prefix + tensor in stored}
    return LayerWeights(**parts)
