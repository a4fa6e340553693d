"""Activations quantized once and read by several packed weights, such as q, k and v or gate and up. CPU only."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import cpu, native
from .layout import K_BLOCK, padded
from .packing import PackedWeight


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


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedActivations:
    """x [..., k] as 8-bit digits, made by :func:`quantize`.

    Attributes:
        shape: of x.
        dtype: of x, and of the products.
        act_bits: 8, one digit scaled per row, or 16, two digits scaled per row and 128 columns.
    """

    shape: torch.Size
    dtype: torch.dtype
    act_bits: int
    _memory: Tensor
    _struct: _ActStruct

    def digits(self) -> Tensor:
        """The integers in x's own column order: int32 [m, k], ``256·hi + lo`` for 16 bits."""
        m, k, planes = self._struct.m, self._struct.k, self.act_bits // 8
        stored = self._memory[: m * planes * k].view(m, planes, k // K_BLOCK, 4, 2, 2, 2)  # [.., t, c, b // 2, b % 2]
        natural = stored.permute(0, 1, 2, 4, 5, 3, 6).reshape(m, planes, k)[..., : self.shape[-1]].int()
        return natural[:, 0] if planes == 1 else natural[:, 0] * 256 + natural[:, 1]

    def scales(self) -> Tensor:
        """float32 [m, 1] for 8 bits, [m, ceil(k/128)] for 16: x ≈ scale · digit."""
        count = self._struct.m * (1 if self.act_bits == 8 else self._struct.k // 128)
        start = self._struct.scales - self._memory.data_ptr()
        return self._memory[start : start + 4 * count].view(torch.float32).view(self._struct.m, -1)


def quantize(x: Tensor, act_bits: int = 16) -> QuantizedActivations:
    """Quantizes x [..., k] (float32, float16 or bfloat16). 8 bits: the digits of :func:`reference.int8_round_trip`,
    to the bit. A row that holds a NaN or an infinity gets a NaN scale.

    Raises:
        NativeError: the CPU library is not built, or the width is neither 8 nor 16.
    """
    act_bytes, init, run, _ = _functions()
    k = x.shape[-1]
    flat, m, stride = cpu.rows_of(x, k)
    k_pad = padded(1, k)[1]
    size = act_bytes(m, k_pad, act_bits)
    memory = torch.empty(size + 63, dtype=torch.int8)
    memory = memory[-memory.data_ptr() % 64 :]
    struct = _ActStruct()
    what = f"quantize: x {list(x.shape)} {x.dtype}, act_bits={act_bits}"
    cpu.check(init(byref(struct), memory.data_ptr(), size, m, k_pad, act_bits), what)
    cpu.check(run(byref(struct), flat.data_ptr(), cpu.DTYPES[x.dtype], k, stride, torch.get_num_threads()), what)
    return QuantizedActivations(x.shape, x.dtype, act_bits, memory, struct)


def int2_gemm_quantized(act: QuantizedActivations, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """:func:`ops.int2_gemm` on activations that are quantized already: bitwise the same result, [..., n].

    Raises:
        ValueError: k or the bias does not fit.
    """
    if act.shape[-1] != w.k:
        raise ValueError(f"int2_gemm_quantized: x has shape {list(act.shape)}, the weight has k={w.k}")
    if bias is not None and (tuple(bias.shape) != (w.n,) or bias.dtype != act.dtype or not bias.is_contiguous()):
        raise ValueError(f"int2_gemm_quantized: bias must be a contiguous {act.dtype} [{w.n}]")
    y = torch.empty((*act.shape[:-1], w.n), dtype=act.dtype)
    code = _functions()[3](
        byref(native.Int2Struct.of(w)), w.n, byref(act._struct), cpu.DTYPES[act.dtype],
        None if bias is None else bias.data_ptr(), y.data_ptr(), w.n, torch.get_num_threads(),
    )  # fmt: skip
    cpu.check(code, f"int2_gemm_quantized: x {list(act.shape)}, weight [{w.n}, {w.k}], {w.spec}")
    return y


@cache
def _functions() -> tuple[Any, ...]:
    act_bytes = cpu.function("trirun_cpu_act_bytes", c_int64, c_int64, c_int)
    act_bytes.restype = c_size_t
    return (
        act_bytes,
        cpu.function("trirun_cpu_act_init", c_void_p, c_void_p, c_size_t, c_int64, c_int64, c_int),
        cpu.function("trirun_cpu_quantize", c_void_p, c_void_p, c_int, c_int64, c_int64, c_int),
        cpu.function(
            "trirun_cpu_int2_gemm_act", c_void_p, c_int64, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int
        ),
    )
