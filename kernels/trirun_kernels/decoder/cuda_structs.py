"""The structures of csrc/trirun.h that the CUDA decoder's kernels take."""

from __future__ import annotations

import ctypes

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class RowsStruct(ctypes.Structure):
    """``trirun_rows`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "up", "residual", "norm", "y", "activations")),
        ("activation_bytes", ctypes.c_size_t),
        *((name, _P) for name in ("tokens", "slots", "latest")),
        *((name, _L) for name in ("m", "n", "ldx", "ldy", "vocab")),
        ("eps", _F),
        *((name, _I) for name in ("source", "dtype", "activation", "act_bits")),
    )


class AttentionStruct(ctypes.Structure):
    """``trirun_attention`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("q", "k", "v", "y", "activations")),
        ("activation_bytes", ctypes.c_size_t),
        *((name, _P) for name in ("keys", "values", "scales", "block_tables", "slots", "positions")),
        *((name, _P) for name in ("q_norm", "k_norm", "cosines", "sines")),
        *((name, _L) for name in ("m", "heads", "kv_heads", "ld_q", "ld_kv", "ld_y", "ld_blocks")),
        *((name, _I) for name in ("head_dim", "rotary_half", "splits", "dtype")),
        ("eps", _F),
        ("scale", _F),
    )


class GatherStruct(ctypes.Structure):
    """``trirun_gather`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("keys", "values", "scales", "block_tables", "slots", "starts")),
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
        ("wants_logprobs", _I),
    )


class SampleStruct(ctypes.Structure):
    """``trirun_sample`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("logits", "slots", "wanted", "samplers", "counts", "bias_tokens", "bias_values")),
        *((name, _P) for name in ("work", "sampled", "logprobs", "latest", "positions", "tokens")),
        *((name, _L) for name in ("m", "vocab", "ld", "bias_capacity")),
        ("dtype", _I),
        ("reserved", _I),
    )
