"""Packed checkpoints as the native decoder of the CPU takes them. Nothing here imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import padded_context, quantize_head
from trirun_kernels.decoder.shape import Attention, DecoderShape, GatedDelta, LayerShape
from trirun_kernels.decoder.weights import (
    DecoderWeights,
    DeltaWeights,
    InputWeights,
    Int8Head,
    LayerWeights,
    Linear,
    MixtureWeights,
    PackedArrays,
    is_packed,
    vector_lengths,
)
from trirun_kernels.weights import numpy_codes
from trirun_kernels.weights.names import (
    BIAS,
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
from ...models.description import UnsupportedModel, description, module_prefix, tensor_prefix
from ...models.hybrids import delta_vectors, gate_rows
from ...models.parts import TensorNames
from ...models.rotary import angles
from ...models.settings import text_settings
from ...models.vectors import final_norm, layer_vectors, router
from ..weight_memory import WeightMemory

# Rows of the head that are converted at a time.
HEAD_ROWS = 256


def decoder_weights(
    source: ModelDir, form: Format, context: int, *, int8_head: bool = True, threads: int = 1
) -> DecoderWeights:
    """The weights of a packed checkpoint as the native decoder takes them: packed tensors and an 8-bit head in large
    pages, an embedding that is not packed in the mapped file, where only the rows of tokens that occur are ever read.

    Args:
        source: the checkpoint directory. form: the quantization section of its config.json.
        context: positions that the rotary angles cover, rounded up to the decoder's key block.
        int8_head: quantize the output head, with ``threads`` threads, unless it is packed.

    Raises:
        UnsupportedModel, InputError: see :class:`~.decoder.NativeDecoder`.
    """
    found, prefix = description(source.config), tensor_prefix(source)
    shape, names = found.shape, found.names
    kinds = [(type(layer.mixer), layer.mixer.shared_with is None) for layer in shape.layers]
    if lost_of_layer := missing_in_a_layer(source, kinds, prefix):
        raise UnsupportedModel(f"there is no tensor {lost_of_layer}, which other layers have")
    modules_in = module_prefix(source, names.of(shape.layers[0]).modules()[0])
    layers = [(layer_prefix(i, prefix), layer_prefix(i, modules_in), layer) for i, layer in enumerate(shape.layers)]
    bare = [each + module for _, each, layer in layers for module in names.of(layer).modules(layer.mixture)]
    if missing := [module for module in bare if module + SCALE not in source]:
        raise UnsupportedModel(f"{missing[0]} is not packed ({len(missing)} of {len(bare)} linear layers are not)")
    embedding, head = embedding_names(text_settings(source.config), source, prefix)
    needed = [module + WEIGHT for module in bare] + [embedding]
    if lost := [name for name in needed if name not in source]:
        raise InputError(f"{source.path} holds no {lost[0]}")
    outer = {name.removesuffix(WEIGHT) for name in (embedding, head)}
    if shape.inputs is not None:
        outer.add(modules_in + names.inputs["projection"])
    packed_outer = {module for module in outer if module + SCALE in source}
    int8_head &= head.removesuffix(WEIGHT) not in packed_outer
    modules = [*bare, *packed_outer]
    parts = [module + part for module in modules for part in (WEIGHT, SCALE, ZERO) if module + part in source]
    capacity = sum(WeightMemory.size(source[name].nbytes) for name in parts)
    if int8_head:
        capacity += WeightMemory.size(shape.vocab * Int8Head.stride(shape.hidden))
    memory = WeightMemory(source, capacity)
    norm, norm_bias = final_norm(source, found, prefix)
    positions = padded_context(context)
    tables = zip(found.rotary, shape.rotary_halves, strict=False)
    matrices: dict[str, Any] = {m: _packed(source, form, m, memory.tensor) for m in sorted(packed_outer)}
    if int8_head:
        own_head: Any = _int8_head(source, head, memory, shape, threads)
    else:
        own_head = matrices.get(head.removesuffix(WEIGHT)) or source.mapped(head)
    return DecoderWeights(
        shape,
        [
            _layer(source, form, names.of(layer), (each, modules), shape, layer, memory.tensor)
            for each, modules, layer in layers
        ],
        matrices.get(embedding.removesuffix(WEIGHT)) or source.mapped(embedding),
        own_head,
        norm,
        [angles(settings, half, positions) for settings, half in tables],
        norm_bias,
        None if shape.inputs is None else _inputs(source, names, (prefix, modules_in), matrices),
    )


def _inputs(source: ModelDir, names: TensorNames, prefixes: tuple[str, str], matrices: dict[str, Any]) -> InputWeights:
    """What every layer's own input is made of, the table in the mapped file. ``prefixes``: what names begin with, of
    tensors and of packed modules; ``matrices``: packed ones by their modules.

    Raises:
        InputError: a tensor is not there.
    """
    prefix, modules_in = prefixes
    table, projection = (prefix + names.inputs[each] + WEIGHT for each in ("table", "projection"))
    norm, packed = prefix + names.inputs["norm"], matrices.get(modules_in + names.inputs["projection"])
    if lost := [name for name in (table, norm, *(() if packed else (projection,))) if name not in source]:
        raise InputError(f"{source.path} holds no {lost[0]}")
    return InputWeights(source.mapped(table), packed or source.mapped(projection), source.floats(norm))


def head_kind(weights: DecoderWeights) -> str:
    """How many bits the output head has, for people."""
    if is_packed(weights.head):
        return "2-bit head"
    return "8-bit head" if isinstance(weights.head, Int8Head) else "head unquantized"


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


def _packed(stored: ModelDir, form: Format, module: str, read: Callable[[str], Array]) -> PackedArrays:
    form.check(stored, module)
    words = read(module + WEIGHT)
    n, k = form.shape(module, words.shape)
    zeros = read(module + ZERO) if module + ZERO in stored else None
    return PackedArrays(words, read(module + SCALE), zeros, n, k, form.spec(module))


def _layer(
    stored: ModelDir,
    form: Format,
    names: TensorNames,
    prefixes: tuple[str, str],
    shape: DecoderShape,
    layer: LayerShape,
    read: Callable[[str], Array],
) -> LayerWeights:
    """``prefixes``: what names begin with, of vectors and of packed modules."""
    prefix, modules_in = prefixes

    def dense(within: str) -> np.ndarray:
        return _dense(stored, form, prefixes, within)

    def linear(within: str) -> Linear:
        bias = prefix + within + BIAS
        weight = _packed(stored, form, modules_in + within, read)
        return Linear(weight, stored.floats(bias) if bias in stored else None)

    sizes, mixer = layer.linear_sizes(shape.hidden), layer.mixer
    joined = {name for parts in names.fused.values() for name in parts}
    apart = {name: names.linears[name] for name in sizes if name not in joined}
    # Two fields may have the weights of one module.
    found = {module: linear(module) for module in dict.fromkeys(apart.values())}
    parts: dict[str, Any] = {name: found[module] for name, module in apart.items()}
    for module, fields in names.fused.items():
        # Queries and their gates alternate, head by head.
        heads = mixer.heads if "q_gate" in fields and isinstance(mixer, Attention) else 1
        parts |= _split(prefix + module, linear(module), {field: sizes[field][0] for field in fields}, heads)
    if isinstance(mixer, GatedDelta):
        gates = gate_rows(names, mixer, dense)
        rest = delta_vectors(stored, prefix, mixer)
        parts["delta"] = DeltaWeights(
            parts.pop("qkv"), parts.pop("z", None), np.ascontiguousarray(np.concatenate(gates)), **rest
        )
    vectors = layer_vectors(stored, names, prefix, vector_lengths(layer, shape.hidden))
    if layer.mixture is not None:
        modules, experts = names.mixture, range(layer.mixture.routing.experts)
        each: dict[str, Any] = {
            part: [linear(f"{modules.experts}.{index}.{part}") for index in experts] for part in ("gate", "up", "down")
        }
        groups = sorted({expert.weight.spec.group_size for part in each.values() for expert in part})
        if len(groups) > 1:
            told = " and ".join(map(str, groups))
            raise UnsupportedModel(f"{modules_in}{modules.experts} have groups of {told}, and it takes one size")
        own = router(stored, modules, prefix, dense, vectors.get("mlp_norm"))
        parts["mixture"] = MixtureWeights(**each | own)
    absent: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up", "down", "attention_norm", "mlp_norm"))
    return LayerWeights(**absent | parts | vectors)


def _dense(stored: ModelDir, form: Format, prefixes: tuple[str, str], within: str) -> np.ndarray:
    """A weight as float32 [n, k], whether it is packed or not."""
    bare, module = (prefix + within for prefix in prefixes)
    if module + SCALE not in stored:
        if bare + WEIGHT not in stored:
            raise UnsupportedModel(f"there is no tensor {bare}{WEIGHT}")
        return stored.floats(bare + WEIGHT)
    packed = _packed(stored, form, module, lambda name: Array.of(stored.array(name)))
    # The arrays that were just read.
    zeros = None if packed.zeros is None else packed.zeros.owner
    return numpy_codes.unpack(packed.words.owner, packed.scales.owner, zeros, packed.n, packed.k, packed.spec).dense()


def _split(module: str, whole: Linear, sizes: dict[str, int], heads: int = 1) -> dict[str, Linear]:
    """Linears whose outputs lie one after another in one packed weight, each in whole n tiles of it; or, of so many
    heads, those of a head after those of another.

    Raises:
        UnsupportedModel: one ends within an n tile. InputError: they are not as many rows as the weight has.
    """
    weight: Any = whole.weight
    if sum(sizes.values()) != weight.n:
        raise InputError(f"{module} has {weight.n} rows, config.json says {sum(sizes.values())}")
    each = [n // heads for n in sizes.values()]
    if any(n % 64 for n in (each if heads > 1 else each[:-1])):
        raise UnsupportedModel(f"{module} joins {' and '.join(map(str, each))} rows, no whole n tiles of 64")
    parts, first, stride = {}, 0, sum(each)
    for name, n in sizes.items():
        count = -(-(n // heads) // 64) * 64
        rows = np.concatenate([np.arange(first + h * stride, first + h * stride + count) for h in range(heads)])
        scales, zeros = (None if x is None else _columns(x, rows) for x in (weight.scales, weight.zeros))
        bias = None if whole.bias is None else whole.bias[rows[:n]].copy()
        parts[name] = Linear(PackedArrays(_tiles(weight.words, rows), scales, zeros, n, weight.k, weight.spec), bias)
        first += n // heads
    return parts


def _tiles(words: Array, rows: np.ndarray) -> Array:
    """The n tiles of these rows: in place where they lie one after another."""
    tiles = rows[::64] // 64
    if tiles[-1] - tiles[0] + 1 == len(tiles):
        return words.rows(int(tiles[0]), len(tiles))
    count, *rest = words.shape
    whole = np.ctypeslib.as_array((ctypes.c_int32 * (count * rest[0] * rest[1])).from_address(words.address))
    return Array.of(whole.reshape(words.shape)[tiles])


def _columns(x: Array, rows: np.ndarray) -> Array:
    """Columns of a float16 matrix, in memory of their own."""
    count, columns = x.shape
    whole = np.ctypeslib.as_array((ctypes.c_uint16 * (count * columns)).from_address(x.address)).view(np.float16)
    return Array.of(np.ascontiguousarray(whole.reshape(count, columns)[:, rows]))
