"""int2_gemm on CPU tensors: the compiled library where it is built, the reference twin where it is not."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..weights.packing import PackedWeight
from . import reference

DTYPES = {getattr(torch, name): code for name, code in native.DTYPES.items()}
_CODES = {-1: "BAD_SHAPE", -2: "BAD_POINTER", -3: "UNSUPPORTED", -4: "NO_WORKSPACE (out of memory)"}


def backend() -> str:
    """What computes int2_gemm on this machine: "amx", "avx512vnni", "avx2", "portable", or "reference" where the
    library is not built.

    Raises:
        NativeError: a library exists, but :func:`trirun_kernels.native.load` refuses it.
    """
    if not native.library_path("cpu").exists():
        return "reference"
    name = native.load("cpu").trirun_cpu_isa
    name.restype = ctypes.c_char_p
    return name().decode()


def function(name: str, *argtypes: type) -> Any:
    """A function of the library that returns a code, with its argument types."""
    found = getattr(native.load("cpu"), name)
    found.argtypes, found.restype = argtypes, c_int
    return found


def check(code: int, what: str) -> None:
    """Raises NativeError for a return code that is not TRIRUN_OK; ``what`` has the numbers."""
    if code:
        raise native.NativeError(f"{what}: {_CODES.get(code, code)}")


def rows_of(x: Tensor, k: int) -> tuple[Tensor, int, int]:
    """x [..., k] as [m, k] with unit column stride, m, and the row stride; copies only where no view will do."""
    flat = x if x.dim() == 2 else x.reshape(-1, k)
    m = flat.shape[0]
    stride, inner = flat.stride()
    if (inner != 1 and k > 1) or (m > 1 and stride < k):
        flat = flat.contiguous()
        stride = k
    return flat, m, stride if m > 1 else k


def int2_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    zero: float,
    act_bits: int,
) -> Tensor:
    """The CPU implementation of ``trirun::int2_gemm``; arguments as in :mod:`trirun_kernels.gemm.ops`. Runs on
    ``torch.get_num_threads()`` threads of the library's own pool; the result does not depend on their number."""
    run = _int2_gemm()
    if run is None:
        w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
        return reference.int2_gemm(x, w, bias, act_bits=act_bits)
    y = x.new_empty((*x.shape[:-1], n))
    flat, m, stride = rows_of(x, k)
    words, scales = words.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    bias = None if bias is None else bias.contiguous()
    strips, blocks, _ = words.shape
    struct = native.Int2Struct(
        words.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        strips * 64, blocks * 32, group_size, zero,
    )  # fmt: skip
    code = run(
        byref(struct), n, k, flat.data_ptr(), DTYPES[x.dtype], m, stride,
        None if bias is None else bias.data_ptr(), y.data_ptr(), n, act_bits, torch.get_num_threads(),
    )  # fmt: skip
    if code:
        check(code, f"trirun_cpu_int2_gemm: x [{m}, {k}] {x.dtype}, weight [{n}, {k}] in groups of {group_size}")
    return y


@cache
def _int2_gemm() -> Any | None:
    if backend() == "reference":
        return None
    return function(
        "trirun_cpu_int2_gemm", c_void_p, c_int64, c_int64, c_void_p, c_int, c_int64, c_int64,
        c_void_p, c_void_p, c_int64, c_int, c_int,
    )  # fmt: skip
