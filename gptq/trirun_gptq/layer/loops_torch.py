"""The innermost loops of GPTQ and coordinate descent, over some columns: in PyTorch, in ``loops_triton.py`` for GPUs.

Both work on transposed matrices (one row of memory per column of the weight), so that a step reads and writes
contiguous memory.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

from .column_grid import ColumnGrid

# Columns solved before the update of the rest is one matrix product. Small, so that a step's rank-one update stays in
# the first cache and below the size at which torch starts threads for it.
COLUMNS = 32


def loops(device: torch.device) -> ModuleType:
    """The module whose ``round_block``, ``descend_block`` and ``COLUMNS`` serve a device."""
    if device.type == "cuda" and has_triton():
        from . import loops_triton

        return loops_triton
    return sys.modules[__name__]


def has_triton() -> bool:
    """Whether the GPU loops can be compiled. PyTorch's CUDA wheels for Linux bring Triton with them."""
    return importlib.util.find_spec("triton") is not None


def assign(weight: Tensor, scales: Tensor, zeros: Tensor | float, levels: int) -> Tensor:
    """The nearest code of every weight, float32 ``clamp(round(w/s + z), 0, levels − 1)``, ties to even.

    Args:
        weight, scales, zeros: shapes that broadcast. levels: 4, or 3 for ternary.
    """
    return (weight / scales + zeros).round_().clamp_(0, levels - 1)


def round_block(work: Tensor, codes: Tensor, errors: Tensor, triangle: Tensor, grid: ColumnGrid) -> None:
    """Round some columns in order, pushing each error onto the later ones of them (GPTQ, eq. 2; see ``gptq.py``).

    Args:
        work: float32 [columns, n], the target so far; used up. codes, errors: written, float32 [columns, n]; an error
            is divided by its column's diagonal of U.
        triangle: float32 [columns, columns], the block of U on the diagonal; rows may be strided.
        grid: of these columns.
    """
    pivots = triangle.diagonal().tolist()
    for j, (s, z) in enumerate(grid.of_columns()):
        q = assign(work[j], s, z, grid.levels)
        codes[j] = q
        errors[j] = (work[j] - s * (q - z)) / pivots[j]
        work[j + 1 :].addr_(triangle[j, j + 1 :], errors[j], alpha=-1)


def descend_block(
    gradient: Tensor, codes: Tensor, dense: Tensor, error: Tensor, local: Tensor, grid: ColumnGrid
) -> None:
    """Give some columns in turn their best codes, all others held fixed (coordinate descent).

    Args:
        gradient: float32 [columns, n], half the gradient of the loss; used up.
        codes, dense, error: float32 [columns, n], codes, their values, and values minus target; updated.
        local: float32 [columns, columns], the block of H on the diagonal; rows may be strided.
        grid: of these columns.
    """
    curvature = local.diagonal().tolist()
    for j, (s, z) in enumerate(grid.of_columns()):
        best = assign(dense[j] - gradient[j] / curvature[j], s, z, grid.levels)
        value = s * (best - z)
        change = value - dense[j]
        gradient.addr_(local[:, j], change)
        error[j] += change
        codes[j], dense[j] = best, value
