"""int2_gemm on CPU tensors: the compiled library where it is built, the reference where it is not."""

from __future__ import annotations

from ctypes import byref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..weights.packing import PackedWeight
from . import reference

DTYPES = {getattr(torch, name): code for name, code in native.DTYPES.items()}


def backend() -> str:
    """What computes int2_gemm on this machine: "amx", "avx512vnni", "avx2", "portable", or "reference" where the
    library is not built.

    Raises:
        NativeError: a library exists, but :func:`trirun_kernels.native.load` refuses it.
    """
    if not native.library_path("cpu").exists():
        return "reference"
    return native.cpu().trirun_cpu_isa().decode()


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
    """The CPU implementation of ``trirun::int2_gemm``: x [..., k] → [..., n] in x's dtype (float32, float16 or
    bfloat16), the other arguments as in :mod:`trirun_kernels.gemm.ops`. Runs on ``torch.get_num_threads()`` threads of
    the library's own pool; the result does not depend on their number.

    Raises:
        NativeError: the library refuses the arguments or is out of memory; the message has the sizes.
    """
    run = _int2_gemm()
    if run is None:
        w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
        return reference.int2_gemm(x, w, bias, act_bits=act_bits)
    y = x.new_empty((*x.shape[:-1], n))
    flat, m, stride = rows_of(x, k)
    words, scales = words.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    bias = None if bias is None else bias.contiguous()
    struct = weight_struct(words, scales, zeros, group_size, zero)
    code = run(
        byref(struct), n, k, flat.data_ptr(), DTYPES[x.dtype], m, stride,
        None if bias is None else bias.data_ptr(), y.data_ptr(), n, act_bits, torch.get_num_threads(),
    )  # fmt: skip
    if code:
        native.check_cpu(
            code, f"trirun_cpu_int2_gemm: x [{m}, {k}] {x.dtype}, weight [{n}, {k}] in groups of {group_size}"
        )
    return y


def weight_struct(
    words: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, zero: float
) -> native.Int2Struct:
    """``trirun_int2`` of the contiguous tensors of a packed weight: words int32 [n/64, k/32, 128], n and k padded."""
    n_tiles, k_blocks, _ = words.shape
    return native.Int2Struct(
        words.data_ptr(), scales.data_ptr(), None if zeros is None else zeros.data_ptr(),
        n_tiles * 64, k_blocks * 32, group_size, zero,
    )  # fmt: skip


@cache
def _int2_gemm() -> Any | None:
    return None if backend() == "reference" else native.cpu().trirun_cpu_int2_gemm
