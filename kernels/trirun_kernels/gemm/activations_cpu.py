"""The CPU half of :mod:`trirun_kernels.gemm.activations`: int8 limbs in one buffer, read by several packed weights."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from .. import native
from ..weights.shapes import K_BLOCK, padded
from . import cpu


class ActStruct(ctypes.Structure):
    """``trirun_act`` of csrc/trirun.h: where in a buffer the limbs, scales and sums of m rows lie."""

    _fields_ = (
        ("limbs", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("m", c_int64),
        ("k", c_int64),
        ("act_bits", c_int32),
    )


def activation_bytes(m: int, k_pad: int, act_bits: int) -> int:
    """Bytes of the quantized form of m rows, as csrc/trirun.h's ``trirun_cpu_act_bytes`` computes them.

    Raises:
        NativeError: the CPU library is not built.
    """
    return native.cpu().trirun_cpu_act_bytes(m, k_pad, act_bits)


def quantize_activations(x: Tensor, act_bits: int) -> Tensor:
    """The CPU implementation of ``trirun::quantize_activations``: x [m, k] (float32, float16 or bfloat16) to a uint8
    buffer of :func:`activation_bytes`. 8 bits: the integers of :func:`reference.int8_round_trip`, to the bit. 16 bits:
    two int8 limbs per value. A row that holds a NaN or an infinity gets a NaN scale.

    Raises:
        NativeError: the CPU library is not built.
    """
    m, k = x.shape
    flat, _, stride = cpu.rows_of(x, k)
    k_pad = padded(1, k)[1]
    buffer = torch.empty(activation_bytes(m, k_pad, act_bits), dtype=torch.uint8)
    struct, dtype = _act(buffer, m, k_pad, act_bits), cpu.DTYPES[x.dtype]
    code = native.cpu().trirun_cpu_quantize(
        byref(struct), flat.data_ptr(), dtype, k, stride, torch.get_num_threads()
    )  # fmt: skip
    native.check_cpu(code, f"quantize_activations: x {list(x.shape)} {x.dtype}, act_bits={act_bits}")
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
    """The CPU implementation of ``trirun::int2_gemm_quantized``: [m, n] of ``dtype``, bitwise what ``int2_gemm`` gives.

    Raises:
        NativeError: the library refuses the arguments; the message has the sizes.
    """
    struct = cpu.weight_struct(words, scales, zeros, group_size, zero)
    act = _act(activations, m, struct.k, act_bits)
    bias = None if bias is None else bias.contiguous()
    y = torch.empty((m, n), dtype=dtype)
    code = native.cpu().trirun_cpu_int2_gemm_act(
        byref(struct), n, byref(act), cpu.DTYPES[dtype], None if bias is None else bias.data_ptr(),
        y.data_ptr(), n, torch.get_num_threads(),
    )  # fmt: skip
    native.check_cpu(code, f"int2_gemm_quantized: {m} rows, weight [{n}, {k}] in groups of {group_size}")
    return y


def integers(activations: Tensor, m: int, k: int, act_bits: int) -> Tensor:
    """The integers of a CPU buffer in x's own column order: int32 [m, k], ``256·high + low`` for 16 bits."""
    k_pad, planes = padded(1, k)[1], act_bits // 8
    stored = _array(activations, "limbs", torch.int8, m * planes * k_pad, m, k_pad, act_bits)
    stored = stored.view(m, planes, k_pad // K_BLOCK, 4, 2, 2, 2)  # [m, plane, k block, t, c, b // 2, b % 2]
    natural = stored.permute(0, 1, 2, 4, 5, 3, 6).reshape(m, planes, k_pad)[..., :k].int()
    return natural[:, 0] if planes == 1 else natural[:, 0] * 256 + natural[:, 1]


def integer_scales(activations: Tensor, m: int, k: int, act_bits: int) -> Tensor:
    """The scales of a CPU buffer: float32 [m, 1] for 8 bits, [m, ceil(k/128)] for 16; x ≈ scale · integer."""
    k_pad = padded(1, k)[1]
    count = m * (1 if act_bits == 8 else k_pad // 128)
    return _array(activations, "scales", torch.float32, count, m, k_pad, act_bits).view(m, -1)


def _array(buffer: Tensor, name: str, dtype: torch.dtype, count: int, m: int, k_pad: int, act_bits: int) -> Tensor:
    """``count`` elements of one of the buffer's arrays, where the library says that it begins."""
    start = getattr(_act(buffer, m, k_pad, act_bits), name) - buffer.data_ptr()
    return buffer[start : start + count * dtype.itemsize].view(dtype)


def _act(buffer: Tensor, m: int, k_pad: int, act_bits: int) -> ActStruct:
    struct = ActStruct()
    code = native.cpu().trirun_cpu_act_init(
        byref(struct), buffer.data_ptr(), buffer.numel(), m, k_pad, act_bits
    )  # fmt: skip
    native.check_cpu(code, f"activations of {m} rows, {k_pad} columns and {act_bits} bits in {buffer.numel()} bytes")
    return struct
