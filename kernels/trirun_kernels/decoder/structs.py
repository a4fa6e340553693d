"""The C structures of the decoder section of csrc/trirun.h, filled from :class:`DecoderWeights`."""

from __future__ import annotations

import ctypes
from typing import Any

from ..arrays import Array
from ..native import DTYPES, Int2Struct
from .weights import ACTIVATIONS, LINEARS, NORMS, SIZES, DecoderWeights, Int8Head, LayerWeights

HEAD_INT8 = 16  # TRIRUN_HEAD_INT8


class LinearStruct(ctypes.Structure):
    """``trirun_linear``."""

    _fields_ = (("weight", Int2Struct), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64))


class LayerStruct(ctypes.Structure):
    """``trirun_layer``."""

    _fields_ = (*((name, LinearStruct) for name in LINEARS), *((name, ctypes.c_void_p) for name in NORMS))


class DecoderStruct(ctypes.Structure):
    """``trirun_decoder``."""

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
    """``trirun_segment``."""

    _fields_ = (("slot", ctypes.c_int64), ("position", ctypes.c_int64), ("count", ctypes.c_int64))


class DrawStruct(ctypes.Structure):
    """``trirun_draw``: how a token is drawn; a temperature of 0 takes the largest logit."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("index", ctypes.c_uint64),
    )


def layer_struct(layer: LayerWeights) -> LayerStruct:
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
