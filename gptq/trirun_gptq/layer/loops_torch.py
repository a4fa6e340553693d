"""The innermost loops of GPTQ and coordinate descent, over some columns: in PyTorch, in ``loops_triton.py`` for GPUs.

Both work on transposed matrices (one row of memory per column of the weight), so that a step reads and writes
contiguous memory.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor
from trirun_kernels import QuantSpec

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


@dataclass(frozen=True, slots=True)
class ColumnGrid:
    """The grid of a weight [n, k], as the loops read it: column by column.

    Attributes:
        groups: int32 [columns], the group of each column that is looked at.
        scales, zeros: float32 [groups, n], all scales and real zeros of the weight; zeros is None when ``zero`` holds.
        zero: the zero point of all groups, or None.
        levels: 4, or 3 for ternary.
    """

    groups: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero: float | None
    levels: int

    @classmethod
    def of(cls, scales: Tensor, zeros: Tensor | None, spec: QuantSpec, levels: int, order: Tensor) -> ColumnGrid:
        """From stored scales and zeros [n, groups], for the columns int64 [k] in this order."""
        size = len(order) if spec.group_size == -1 else spec.group_size
        steps = scales.float().t().contiguous()
        offsets = None if zeros is None else zeros.float().t().contiguous()
        return cls((order // size).int(), steps, offsets, spec.zero, levels)

    def part(self, columns: slice) -> ColumnGrid:
        """The same for some of the columns."""
        return replace(self, groups=self.groups[columns])

    def of_columns(self) -> list[tuple[Tensor, Tensor | float]]:
        """Scale and zero of each column: float32 [n], and the same or a number."""
        fixed = 0.0 if self.zero is None else self.zero
        # One transfer for all columns instead of one for each.
        return [
            (self.scales[group], fixed if self.zeros is None else self.zeros[group]) for group in self.groups.tolist()
        ]


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
