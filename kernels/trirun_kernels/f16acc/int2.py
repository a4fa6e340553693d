"""2-bit weights made dense on their device, which is what products with fp16 sums multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gemm import cuda
from ..plan.problem import DEQUANTIZE, Plan
from ..weights.packing import PackedWeight, dequantize
from .ops import f16acc_gemm

# Making the weight dense is paid back by so many rows of x: on an RTX 4090 by its data sheet, 4 bytes per weight at
# 1 TB/s against half of 2 operations per weight and row at 165 TFLOP/s.
FEWEST_ROWS = 1024

_library = torch.library.Library("trirun", "FRAGMENT")
_library.define(
    "int2_dense(Tensor words, Tensor scales, Tensor? zeros, int n, int k, int group_size, float zero) -> Tensor"
)


def int2_gemm_f16acc(x: Tensor, w: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` with fp16 sums: x [..., k] float16 → [..., n] float16."""
    dense = torch.ops.trirun.int2_dense(w.words, w.scales, w.zeros, w.n, w.k, w.spec.group_size, w.spec.zero_operand)
    return f16acc_gemm(x, dense, bias)


def _dense_on_cpu(*weight: Any) -> Tensor:
    return dequantize(PackedWeight.of_operands(*weight), torch.float16)


def _dense_on_cuda(*weight: Any) -> Tensor:
    w = PackedWeight.of_operands(*weight)
    # Rows of whole 16 bytes, as products read them.
    dense = w.words.new_empty((w.n, -(-w.k // 8) * 8), dtype=torch.float16)[:, : w.k]
    with torch.cuda.device(dense.device):
        cuda.run_plan(dense, w, None, dense, 16, Plan(DEQUANTIZE))
    return dense


_library.impl("int2_dense", _dense_on_cpu, "CPU")
_library.impl("int2_dense", _dense_on_cuda, "CUDA")


@torch.library.register_fake("trirun::int2_dense", lib=_library)
def _int2_dense_fake(
    words: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, group_size: int, zero: float
) -> Tensor:
    if words.is_cuda:
        return words.new_empty((n, -(-k // 8) * 8), dtype=torch.float16)[:, :k]
    return words.new_empty((n, k), dtype=torch.float16)
