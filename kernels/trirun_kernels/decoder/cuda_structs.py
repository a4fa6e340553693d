"""The structures of csrc/trirun.h that the CUDA decoder's kernels take."""

from __future__ import annotations

import ctypes

from ..native import Int2Struct

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class CombineStruct(ctypes.Structure):
    """``trirun_combine`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "places", "weights", "shared", "shared_weights", "norm", "shared_norm", "y")),
        *((name, _L) for name in ("m", "n", "ldx", "ld_shared", "ldy")),
        *((name, _I) for name in ("top_k", "dtype")),
        ("eps", _F),
    )


class RowsStruct(ctypes.Structure):
    """``trirun_rows`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "up", "residual", "norm", "norm_bias", "post_norm", "y", "activations")),
        ("activation_bytes", ctypes.c_size_t),
        *((name, _P) for name in ("tokens", "slots", "latest")),
        *((name, _L) for name in ("m", "n", "ldx", "ldy", "vocab")),
        ("eps", _F),
        ("scale", _F),
        *((name, _I) for name in ("source", "dtype", "activation", "act_bits", "centered")),
        ("output_scale", _F),
        ("packed", ctypes.POINTER(Int2Struct)),
        ("mixed", ctypes.POINTER(CombineStruct)),
    )


class AttentionStruct(ctypes.Structure):
    """``trirun_attention`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("q", "k", "v", "y", "activations")),
        ("activation_bytes", ctypes.c_size_t),
        *((name, _P) for name in ("keys", "values", "scales", "block_tables", "slots", "positions")),
        *((name, _P) for name in ("q_norm", "k_norm", "v_norm", "cosines", "sines", "sinks")),
        *((name, _L) for name in ("m", "heads", "kv_heads", "ld_q", "ld_kv", "ld_y", "ld_blocks")),
        *((name, _I) for name in ("head_dim", "rotary_half", "splits", "dtype", "interleaved", "window")),
        *((name, _F) for name in ("eps", "scale", "softcap")),
        ("reserved", _I),
    )


class GatherStruct(ctypes.Structure):
    """``trirun_gather`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values", "scales", "block_tables", "slots", "starts", "pages")),
        *((name, _P) for name in ("keys_out", "values_out")),
        *((name, _L) for name in ("count", "longest", "kv_heads", "ld_blocks")),
        *((name, _I) for name in ("head_dim", "dtype")),
    )


class SamplerStruct(ctypes.Structure):
    """``trirun_sampler`` of csrc/trirun.h: how one slot's tokens are chosen."""

    _fields_ = (
        *((name, _F) for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")),
        ("top_k", _I),
        ("bias_count", _I),
        ("seed", ctypes.c_uint64),
        ("drawn", ctypes.c_uint32),
        *((name, _I) for name in ("wants_logprobs", "masked", "reserved")),
    )


class SampleStruct(ctypes.Structure):
    """``trirun_sample`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("logits", "slots", "wanted", "samplers", "counts", "bias_tokens", "bias_values")),
        *((name, _P) for name in ("masks", "work", "sampled", "logprobs", "latest", "positions", "tokens")),
        *((name, _L) for name in ("m", "vocab", "ld", "bias_capacity")),
        ("dtype", _I),
        ("reserved", _I),
    )


class RouteStruct(ctypes.Structure):
    """``trirun_route`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "router", "logits", "bias", "correction", "expert_scale", "slots", "weights")),
        *((name, _P) for name in ("shared_weights", "ids", "places", "order", "tiles", "ends", "counter")),
        *((name, _L) for name in ("m", "k", "ldx", "ld")),
        *((name, _I) for name in ("experts", "top_k", "tile_rows", "score", "groups", "top_groups", "normalize")),
        ("dtype", _I),
        ("scale", _F),
        ("rows", ctypes.POINTER(RowsStruct)),
    )


class ExpertsStruct(ctypes.Structure):
    """``trirun_experts`` of csrc/trirun.h."""

    _fields_ = (
        ("w", Int2Struct),
        *((name, _P) for name in ("bias", "x", "activations", "order", "tiles", "y")),
        *((name, _L) for name in ("n", "k", "ldx", "ldy", "tile_bound")),
        *((name, _I) for name in ("top_k", "tile_rows", "gated", "activation", "act_bits", "dtype")),
        ("limit", _F),
        ("rows", _I),
    )
