"""Where the tensors of a mixture of experts lie in a model's files."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

# Of trirun_kernels.weights.experts.SeparateExperts, which replaces the fused module ``<path>.experts``.
_EXPERT = re.compile(r"(?P<path>.*\.experts)\.(?P<index>\d+)\.(?P<layer>gate|up|down)\.weight")
# The names that families of models store: Qwen-MoE and its many descendants, Mixtral.
_STORED = ({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, {"gate": "w1", "up": "w3", "down": "w2"})


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


def stored_as(name: str, files: Container[str]) -> tuple[str | None, Cut | None]:
    """The stored name of a module's tensor, and how to cut it from that; None when it is all of it.

    Args:
        name: of the tensor in the model. files: the stored names.

    Returns:
        (None, None) when it is not stored.
    """
    # transformers renames Mixtral's blocks while it loads, and EXAONE's tensors beside the gate.
    for candidate in (name, name.replace(".mlp.", ".block_sparse_moe."), name.replace(".mlp.gate.", ".mlp.")):
        if candidate in files:
            return candidate, None
        match = _EXPERT.fullmatch(candidate)
        if match is None:
            continue
        path, index, layer = match["path"], int(match["index"]), match["layer"]
        for names in _STORED:
            if f"{path}.{index}.{names[layer]}.weight" in files:
                return f"{path}.{index}.{names[layer]}.weight", None
        if layer == "down" and f"{path}.down_proj" in files:
            return f"{path}.down_proj", Cut(index)
        if layer != "down" and f"{path}.gate_up_proj" in files:
            return f"{path}.gate_up_proj", Cut(index, 0 if layer == "gate" else 1)
    return None, None


def is_expert(name: str) -> bool:
    """Whether a tensor of the model is the weight of an expert's layer."""
    return _EXPERT.fullmatch(name) is not None
