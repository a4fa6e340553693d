"""A weight's grid as the innermost loops read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from trirun_kernels import QuantSpec


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
