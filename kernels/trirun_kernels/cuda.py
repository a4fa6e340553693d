"""int2_gemm on CUDA tensors."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .packing import PackedWeight
from .spec import QuantSpec


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
    """The CUDA implementation of ``trirun::int2_gemm``; arguments as in :mod:`trirun_kernels.ops`."""
    w = PackedWeight(words, scales, zeros, n, k, QuantSpec(group_size, zero if zeros is None else None))
    return reference.int2_gemm(x, w, bias, act_bits=act_bits)
