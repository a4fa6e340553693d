"""The C structures of csrc/trirun.h's section on the native decoder, filled from :class:`DecoderWeights`.

A structure points into the arrays that it was made from: keep them alive."""

from __future__ import annotations

import ctypes
from typing import Any

from ..arrays import Array
from ..native import DTYPES, Int2Struct
from .weights import ACTIVATIONS, LINEARS, NORMS, SIZES, DecoderWeights, Int8Head, LayerWeights

HEAD_INT8 = 16  # TRIRUN_HEAD_INT8


class LinearStruct(ctypes.Structure):
    """``trirun_linear``: a packed weight [n, k] and its float32 bias [n]."""

    _fields_ = (("weight", Int2Struct), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64))


class LayerStruct(ctypes.Structure):
    """``trirun_layer``: the linears and norms of :class:`~.weights.LayerWeights`."""

    _fields_ = (*((name, LinearStruct) for name in LINEARS), *((name, ctypes.c_void_p) for name in NORMS))


class DecoderStruct(ctypes.Structure):
    """``trirun_decoder``: sizes, weights and cache of a whole model."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*SIZES, "slots", "context", "rotary_half")),
        ("norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("activation", "act_bits", "kv_dtype", "embedding_dtype")),
        ("embedding", ctypes.c_void_p),
        ("head_dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("head", ctypes.c_void_p),
        ("head_scales", ctypes.c_void_p),
        ("layer", ctypes.POINTER(LayerStruct)),
        *((name, ctypes.c_void_p) for name in ("final_norm", "cosines", "sines", "keys", "values")),
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


def layer_struct(layer: LayerWeights) -> LayerStruct:
    """A layer as C sees it, from weights that :meth:`DecoderWeights.check` has seen."""
    struct = LayerStruct()
    for name in LINEARS:
        linear = getattr(layer, name)
        bias = None if linear.bias is None else _address(linear.bias)
        setattr(struct, name, LinearStruct(Int2Struct.of(linear.weight), bias, linear.weight.n, linear.weight.k))
    for name in NORMS:
        norm = getattr(layer, name)
        setattr(struct, name, None if norm is None else _address(norm))
    return struct


def _address(x: Any) -> int:
    return Array.of(x).address


def decoder_struct(
    weights: DecoderWeights, layers: Any, slots: int, context: int, act_bits: int, kv_dtype: str
) -> DecoderStruct:
    """A model as C sees it, but for the addresses of its cache.

    Args:
        weights: that :meth:`DecoderWeights.check` has seen. layers: an array of :class:`LayerStruct`.
        slots: sequences of the cache. context: positions of each, as ``trirun_cpu_decoder_context`` rounds them.
        act_bits: 8 or 16. kv_dtype: "float16" or "float32".
    """
    shape, int8 = weights.shape, isinstance(weights.head, Int8Head)
    return DecoderStruct(
        *(getattr(shape, name) for name in SIZES),
        slots,
        context,
        shape.rotary_half,
        shape.norm_eps,
        shape.attention_scale,
        ACTIVATIONS[shape.activation],
        act_bits,
        DTYPES[kv_dtype],
        DTYPES[Array.of(weights.embedding).dtype],
        _address(weights.embedding),
        HEAD_INT8 if int8 else DTYPES[Array.of(weights.head).dtype],
        0,
        _address(weights.head.rows if int8 else weights.head),
        _address(weights.head.scales) if int8 else None,
        layers,
        *(_address(array) for array in (weights.final_norm, weights.cosines, weights.sines)),
    )
