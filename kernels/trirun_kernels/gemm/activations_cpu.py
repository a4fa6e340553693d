"""The CPU half of :mod:`trirun_kernels.gemm.activations`: digits in one buffer, read by several packed weights."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..weights.layout import K_BLOCK, padded
from . import cpu


class _ActStruct(ctypes.Structure):
    """``trirun_act`` of csrc/trirun.h."""

    _fields_ = (
        ("digits", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("m", c_int64),
        ("k", c_int64),
        ("act_bits", c_int32),
    )


def activation_bytes(m: int, k_pad: int, act_bits: int) -> int:
    """Bytes of the quantized form of m rows: ``trirun_cpu_act_bytes`` of csrc/trirun.h."""
    scales, sums = (m if act_bits == 8 else m * (k_pad // 128)), m * (k_pad // K_BLOCK)
    return m * (act_bits // 8) * k_pad + (-(-scales // 16) + -(-sums // 16)) * 64 + 64


def quantize_activations(x: Tensor, act_bits: int) -> Tensor:
    """The CPU implementation of ``trirun::quantize_activations``. 8 bits: the digits of
    :func:`reference.int8_round_trip`, to the bit. A row that holds a NaN or an infinity gets a NaN scale.

    Raises:
        NativeError: the CPU library is not built.
    """
    m, k = x.shape
    flat, _, stride = cpu.rows_of(x, k)
    k_pad = padded(1, k)[1]
    buffer = torch.empty(activation_bytes(m, k_pad, act_bits), dtype=torch.uint8)
    struct = _act(buffer, m, k_pad, act_bits)
    code = _functions()[1](byref(struct), flat.data_ptr(), cpu.DTYPES[x.dtype], k, stride, torch.get_num_threads())
    cpu.check(code, f"quantize_activations: x {list(x.shape)} {x.dtype}, act_bits={act_bits}")
    return buffer


def int2_gemm_quantized(
    activations: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    m: int,
    group_size: int,
    zero: float,
    act_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The CPU implementation of ``trirun::int2_gemm_quantized``: bitwise what ``int2_gemm`` gives."""
    strips, blocks, _ = words.shape
    struct = native.Int2Struct(
        words.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        strips * 64, blocks * 32, group_size, zero,
    )  # fmt: skip
    act = _act(activations, m, blocks * 32, act_bits)
    bias = None if bias is None else bias.contiguous()
    y = torch.empty((m, n), dtype=dtype)
    code = _functions()[2](
        byref(struct), n, byref(act), cpu.DTYPES[dtype], None if bias is None else bias.data_ptr(),
        y.data_ptr(), n, torch.get_num_threads(),
    )  # fmt: skip
    cpu.check(code, f"int2_gemm_quantized: {m} rows, weight [{n}, {k}] in groups of {group_size}")
    return y


def digits(activations: Tensor, m: int, k: int, act_bits: int) -> Tensor:
    """The integers of a CPU buffer in x's own column order: int32 [m, k], ``256·hi + lo`` for 16 bits."""
    k_pad, planes = padded(1, k)[1], act_bits // 8
    stored = activations[: m * planes * k_pad].view(torch.int8)
    stored = stored.view(m, planes, k_pad // K_BLOCK, 4, 2, 2, 2)  # [m, plane, k block, t, c, b // 2, b % 2]
    natural = stored.permute(0, 1, 2, 4, 5, 3, 6).reshape(m, planes, k_pad)[..., :k].int()
    return natural[:, 0] if planes == 1 else natural[:, 0] * 256 + natural[:, 1]


def digit_scales(activations: Tensor, m: int, k: int, act_bits: int) -> Tensor:
    """The scales of a CPU buffer: float32 [m, 1] for 8 bits, [m, ceil(k/128)] for 16; x ≈ scale · digit."""
    k_pad = padded(1, k)[1]
    count, start = m * (1 if act_bits == 8 else k_pad // 128), m * (act_bits // 8) * k_pad
    return activations[start : start + 4 * count].view(torch.float32).view(m, -1)


def _act(buffer: Tensor, m: int, k_pad: int, act_bits: int) -> _ActStruct:
    struct = _ActStruct()
    code = _functions()[0](byref(struct), buffer.data_ptr(), buffer.numel(), m, k_pad, act_bits)
    cpu.check(code, f"activations of {m} rows, {k_pad} columns and {act_bits} bits in {buffer.numel()} bytes")
    return struct


@cache
def _functions() -> tuple[Any, ...]:
    return (
        cpu.function("trirun_cpu_act_init", c_void_p, c_void_p, c_size_t, c_int64, c_int64, c_int),
        cpu.function("trirun_cpu_quantize", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int),
        cpu.function(
            "trirun_cpu_int2_gemm_act", c_void_p, c_int64, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int
        ),
    )
