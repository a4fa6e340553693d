"""The layers of a mixture of experts: their names, and their matrices within a fused tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

# Of trirun_kernels.weights.experts.SeparateExperts, which replaces the fused module ``<path>.experts``.
_EXPERT = re.compile(r"(?P<path>.*\.experts)\.(?P<index>\d+)\.(?P<layer>gate|up|down)\.weight")


@dataclass(frozen=True, slots=True)
class Cut:
    """One expert's matrix of a fused tensor [experts, n, k], or the upper (0) or lower (1) half of its rows."""

    expert: int
    half: int | None = None

    def __call__(self, fused: Tensor) -> Tensor:
        """The matrix [n, k] of the fused tensor, in the same memory."""
        matrix = fused[self.expert]
        return matrix if self.half is None else matrix.chunk(2)[self.half]

    def shape(self, fused: list[int]) -> list[int]:
        """Of the matrix, by that of the fused tensor; the latter itself where it holds no such matrix."""
        if len(fused) != 3 or self.expert >= fused[0]:
            return fused
        return [fused[1] if self.half is None else fused[1] // 2, fused[2]]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of one expert: the mixture's path, the expert's number, and ``gate``, ``up`` or ``down``."""

    path: str
    index: int
    layer: str


def expert_of(name: str) -> ExpertLayer | None:
    """Whose weight a tensor of the model is; None where it is no expert's."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else ExpertLayer(match["path"], int(match["index"]), match["layer"])


def is_expert(name: str) -> bool:
    """Whether a tensor of the model is the weight of an expert's layer."""
    return _EXPERT.fullmatch(name) is not None
