"""The layers of a mixture of experts: their names, and their matrices within a fused tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from trirun_kernels.weights.experts import PLAIN, FusedLayout

# Of trirun_kernels.weights.experts.SeparateExperts, which replaces the fused module ``<path>.experts``.
_EXPERT = re.compile(r"(?P<path>.*\.experts)\.(?P<index>\d+)\.(?P<layer>gate|up|down)\.(?P<part>weight|bias)")


class TensorFiles(Protocol):
    """Named tensors in files, such as :class:`~trirun_kernels.weights.safetensors_dir.SafetensorsDir`."""

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""

    def __getitem__(self, name: str) -> Any:
        """Where a tensor lies: its ``shape`` and ``dtype``."""

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One expert's matrix of a fused tensor [experts, n, k], or its bias of one [experts, n]; ``half``: the gate's (0)
    or the up's (1) part of its rows."""

    expert: int
    half: int | None = None
    layout: FusedLayout = PLAIN

    def __call__(self, fused: Tensor) -> Tensor:
        """The matrix [n, k] or the bias [n] of the fused tensor, in the same memory."""
        return self.layout.cut(fused, self.expert, self.half)

    def shape(self, fused: list[int]) -> list[int]:
        """Of the part, by that of the fused tensor; the latter itself where it holds no such part."""
        if len(fused) not in (2, 3) or self.expert >= fused[0]:
            return fused
        n, *k = fused[:0:-1] if self.layout.transposed and len(fused) == 3 else fused[1:]
        return [n if self.half is None else n // 2, *k]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of one expert: the mixture's path, the expert's number, and ``gate``, ``up`` or ``down``; ``part``: its
    ``weight`` or ``bias``."""

    path: str
    index: int
    layer: str
    part: str


def expert_of(name: str) -> ExpertLayer | None:
    """Whose weight or bias a tensor of the model is; None where it is no expert's."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else ExpertLayer(match["path"], int(match["index"]), match["layer"], match["part"])


def is_expert(name: str) -> bool:
    """Whether a tensor of the model is of an expert's layer."""
    return _EXPERT.fullmatch(name) is not None
