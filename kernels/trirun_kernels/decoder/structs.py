"""The C structures of csrc/trirun.h's section on the native decoder, filled from :class:`DecoderWeights`.

A structure points into the arrays that it was made from: keep them alive."""

from __future__ import annotations

import ctypes
from typing import Any

from ..arrays import Array
from ..native import DTYPES, Int2Struct
from .shape import ACTIVATIONS, NORMS, SCORES, GatedDelta, LayerInputs, LayerShape, Mixture
from .weights import (
    LINEARS,
    VECTORS,
    DecoderWeights,
    DeltaWeights,
    InputWeights,
    Int8Head,
    LayerWeights,
    Linear,
    MixtureWeights,
    is_packed,
)

HEAD_INT8, PACKED = 16, 17  # TRIRUN_HEAD_INT8, TRIRUN_PACKED


class LinearStruct(ctypes.Structure):
    """``trirun_linear``: a packed weight [n, k] and its float32 bias [n]."""

    _fields_ = (("weight", Int2Struct), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64))


class DeltaLayerStruct(ctypes.Structure):
    """``trirun_delta_layer``: the weights of :class:`~.weights.DeltaWeights`, sizes, and the layer's states."""

    _fields_ = (
        ("qkv", LinearStruct),
        ("z", LinearStruct),
        *((name, ctypes.c_void_p) for name in ("gates", "conv", "decay_rate", "decay_bias", "norm", "state", "ring")),
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, ctypes.c_int64) for name in ("key_stride", "k_column", "v_column", "value_stride", "z_column")),
        ("z_stride", ctypes.c_int64),
        ("gates_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class MixtureStruct(ctypes.Structure):
    """``trirun_mixture``: the weights of :class:`~.weights.MixtureWeights` and :class:`~.shape.Mixture`."""

    _fields_ = (
        *((name, ctypes.POINTER(LinearStruct)) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("router", "bias", "correction", "expert_scale")),
        *((name, ctypes.c_int64) for name in ("experts", "top_k", "size")),
        *((name, ctypes.c_int32) for name in ("router_dtype", "score", "groups", "top_groups", "normalize")),
        *((name, ctypes.c_int32) for name in ("shared_gate", "activation")),
        *((name, ctypes.c_float) for name in ("scale", "limit")),
        ("reserved", ctypes.c_int32),
    )


class InputsStruct(ctypes.Structure):
    """``trirun_layer_inputs``: the weights of :class:`~.weights.InputWeights` and :class:`~.shape.LayerInputs`.

    Attributes:
        matrix: what ``projection`` points at, which a void pointer does not keep alive.
    """

    matrix: Any

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "projection", "norm")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("table_scale", "projection_scale", "scale")),
        *((name, ctypes.c_int32) for name in ("table_dtype", "projection_dtype", "reserved")),
    )


class LayerStruct(ctypes.Structure):
    """``trirun_layer``: the weights of :class:`~.weights.LayerWeights`, the parts of :class:`~.shape.LayerShape`, and
    the layer's cache."""

    _fields_ = (
        *((name, LinearStruct) for name in LINEARS[:4]),
        ("delta", ctypes.POINTER(DeltaLayerStruct)),
        *((name, LinearStruct) for name in LINEARS[4:]),
        *((name, ctypes.c_void_p) for name in (*VECTORS, "cosines", "sines", "keys", "values")),
        ("mixture", ctypes.POINTER(MixtureStruct)),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "ffn", "rotary_half")),
        *((name, ctypes.c_int64) for name in ("window", "context")),
        *((name, ctypes.c_float) for name in ("attention_scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("activation", "interleaved", "row_norms", "parallel")),
    )


class DecoderStruct(ctypes.Structure):
    """``trirun_decoder``: sizes and weights of a whole model.

    Attributes:
        matrices: what ``embedding``, ``head`` and pointers of ``inputs`` point at, which does not keep it alive.
    """

    matrices: tuple[Any, ...]

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "vocab", "slots", "context")),
        *((name, ctypes.c_float) for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_softcap")),
        *((name, ctypes.c_int32) for name in ("norm", "act_bits", "kv_dtype", "embedding_dtype")),
        ("embedding", ctypes.c_void_p),
        ("head_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("head", ctypes.c_void_p),
        ("head_scales", ctypes.c_void_p),
        ("layer", ctypes.POINTER(LayerStruct)),
        *((name, ctypes.c_void_p) for name in ("final_norm", "final_norm_bias")),
        ("inputs", ctypes.POINTER(InputsStruct)),
    )


class SegmentStruct(ctypes.Structure):
    """``trirun_segment``: consecutive tokens of one slot."""

    _fields_ = (("slot", ctypes.c_int64), ("position", ctypes.c_int64), ("count", ctypes.c_int64))


class DrawStruct(ctypes.Structure):
    """``trirun_draw``: how a token is drawn; a temperature of 0 takes the largest logit.

    Attributes:
        temperature, top_p, min_p, top_k: as samplers know them; 1 of top_p, 0 of the others leaves a filter out.
        stream: of random numbers (SplitMix64). index: of the number that the first token is drawn with.
    """

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
    )


def linear_struct(linear: Linear) -> LinearStruct:
    """A linear as C sees it."""
    weight: Any = linear.weight
    return LinearStruct(Int2Struct.of(weight), _address(linear.bias), linear.weight.n, linear.weight.k)


def layer_struct(layer: LayerWeights, shape: LayerShape, context: int, weights: DecoderWeights) -> LayerStruct:
    """A layer as C sees it, but for the addresses of its cache, from weights that :meth:`DecoderWeights.check` has
    seen. ``context``: positions that its cache holds."""
    struct, mixer, feed_forward = LayerStruct(), shape.mixer, shape.feed_forward
    for name in LINEARS:
        if (linear := getattr(layer, name)) is not None:
            setattr(struct, name, linear_struct(linear))
    for name in VECTORS:
        setattr(struct, name, _address(getattr(layer, name)))
    struct.ffn, struct.activation = feed_forward.size, ACTIVATIONS[feed_forward.activation]
    struct.parallel = shape.parallel
    if layer.mixture is not None and shape.mixture is not None:
        struct.mixture = ctypes.pointer(_mixture_struct(layer.mixture, shape.mixture))
    if isinstance(mixer, GatedDelta):
        assert layer.delta is not None
        struct.delta = ctypes.pointer(_delta_struct(layer.delta, mixer))
        return struct
    if mixer.rotary is not None:
        struct.cosines, struct.sines = map(_address, weights.rotary[mixer.rotary])
        struct.rotary_half = mixer.rotary_half
    struct.heads, struct.kv_heads, struct.head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    struct.window, struct.context = mixer.window or 0, context
    struct.attention_scale, struct.softcap = mixer.scale, mixer.softcap
    struct.interleaved, struct.row_norms = mixer.interleaved, mixer.row_norms
    return struct


def _delta_struct(weights: DeltaWeights, shape: GatedDelta) -> DeltaLayerStruct:
    struct = DeltaLayerStruct(qkv=linear_struct(weights.qkv))
    if weights.z is not None:
        struct.z = linear_struct(weights.z)
    for name in ("gates", "conv", "decay_rate", "decay_bias", "norm"):
        setattr(struct, name, _address(getattr(weights, name)))
    for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
        setattr(struct, name, getattr(shape, name))
    for name, column in shape.columns.items():
        setattr(struct, name, column)
    struct.gates_dtype = DTYPES[Array.of(weights.gates).dtype]
    return struct


def _mixture_struct(weights: MixtureWeights, mixture: Mixture) -> MixtureStruct:
    routing = mixture.routing
    every = weights.gate, weights.up, weights.down
    linears = [(LinearStruct * routing.experts)(*map(linear_struct, each)) for each in every]
    return MixtureStruct(
        *linears,
        *map(_address, (weights.router, weights.bias, weights.correction, weights.expert_scale)),
        routing.experts,
        routing.top_k,
        mixture.size,
        DTYPES[Array.of(weights.router).dtype],
        SCORES[routing.score],
        routing.groups,
        routing.top_groups,
        routing.normalize,
        mixture.shared_gate,
        ACTIVATIONS[mixture.activation],
        routing.scale,
        mixture.limit,
    )


def _address(x: Any) -> int | None:
    return None if x is None else Array.of(x).address


def decoder_struct(
    weights: DecoderWeights, layers: Any, slots: int, context: int, act_bits: int, kv_dtype: str
) -> DecoderStruct:
    """A model as C sees it.

    Args:
        weights: that :meth:`DecoderWeights.check` has seen. layers: an array of :class:`LayerStruct`.
        slots: sequences of the cache. context: positions of each, as ``trirun_cpu_decoder_context`` rounds them.
        act_bits: 8 or 16. kv_dtype: "float16" or "float32".
    """
    shape = weights.shape
    embedding_dtype, embedding = _matrix(weights.embedding)
    head_dtype, head = _matrix(weights.head)
    struct = DecoderStruct(
        len(shape.layers),
        shape.hidden,
        shape.vocab,
        slots,
        context,
        shape.norm_eps,
        shape.embedding_scale,
        shape.residual_scale,
        shape.logit_softcap,
        NORMS[shape.norm],
        act_bits,
        DTYPES[kv_dtype],
        embedding_dtype,
        _pointer(embedding),
        head_dtype,
        0,
        _pointer(head),
        _address(weights.head.scales) if head_dtype == HEAD_INT8 else None,
        layers,
        _address(weights.final_norm),
        _address(weights.final_norm_bias),
    )
    struct.matrices = embedding, head
    if weights.inputs is not None and shape.inputs is not None:
        own = _inputs_struct(weights.inputs, shape.inputs)
        struct.inputs, struct.matrices = ctypes.pointer(own), (embedding, head, own)
    return struct


def _inputs_struct(weights: InputWeights, own: LayerInputs) -> InputsStruct:
    dtype, projection = _matrix(weights.projection)
    struct = InputsStruct(
        _address(weights.table),
        _pointer(projection),
        _address(weights.norm),
        own.size,
        own.table_scale,
        own.projection_scale,
        own.scale,
        DTYPES[Array.of(weights.table).dtype],
        dtype,
    )
    struct.matrix = projection
    return struct


def _matrix(matrix: Any) -> tuple[int, Any]:
    """The type of an embedding or a head by its number in trirun.h, and what its pointer points at: a LinearStruct, or
    an array."""
    if is_packed(matrix):
        return PACKED, linear_struct(Linear(matrix))
    if isinstance(matrix, Int8Head):
        return HEAD_INT8, matrix.rows
    return DTYPES[Array.of(matrix).dtype], matrix


def _pointer(x: Any) -> int | None:
    return ctypes.addressof(x) if isinstance(x, LinearStruct) else _address(x)
