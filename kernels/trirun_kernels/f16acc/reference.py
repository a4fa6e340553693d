"""The reference of ``f16acc_gemm``: tensor cores that add in fp16, step by step, and the CPU implementation."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

STEP = 16  # columns of k of one tensor-core instruction: its products are added exactly, the sum is rounded to fp16


def f16acc_gemm(a: Tensor, b: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """``a @ b.T + bias``; a [..., k], b [n, k] and bias [n] float16, ``chunk`` columns to a fp16 sum.

    A model of mma.sync m16n8k16 and wgmma m64nNk16 with fp16 accumulators: it agrees with them in distribution, not
    bit for bit. A result whose fp16 sums left the range (infinity, or NaN from two of them) is the fp32 product; the
    kernels replace those of a whole warp's tile.
    """
    k = a.shape[-1]
    rows = a.reshape(prod(a.shape[:-1]), k).float()
    wide = b.float()
    total = rows.new_zeros(rows.shape[0], b.shape[0])
    for start in range(0, k, chunk):
        half = torch.zeros_like(total)
        for column in range(start, min(start + chunk, k), STEP):
            step = slice(column, min(column + STEP, start + chunk, k))
            half = (half + rows[:, step] @ wide[:, step].t()).half().float()
        total += half
    if not total.isfinite().all():
        total = torch.where(total.isfinite(), total, rows @ wide.t())
    if bias is not None:
        total += bias.float()
    return total.half().view(*a.shape[:-1], b.shape[0])
