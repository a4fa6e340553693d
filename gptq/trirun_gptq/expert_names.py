"""Where the tensors of a mixture of experts lie in a model's files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container
from typing import Any

from torch import Tensor

# Of trirun_kernels.experts.SeparateExperts, which replaces the fused module ``<path>.experts``.
_EXPERT = re.compile(r"(?P<path>.*\.experts)\.(?P<index>\d+)\.(?P<layer>gate|up|down)\.weight")
# The names that families of models store: Qwen-MoE and its many descendants, Mixtral.
_STORED = ({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, {"gate": "w1", "up": "w3", "down": "w2"})


def stored_as(name: str, files: Container[str]) -> tuple[str | None, Callable[[Any], Tensor] | None]:
    """The stored name of a module's tensor, and how to cut it from a slice of that; None when it is all of it.

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
            return f"{path}.down_proj", functools.partial(_cut, expert=index)
        if layer != "down" and f"{path}.gate_up_proj" in files:
            return f"{path}.gate_up_proj", functools.partial(_cut, expert=index, half=0 if layer == "gate" else 1)
    return None, None


def _cut(fused: Any, expert: int, half: int | None = None) -> Tensor:
    """One expert's matrix of a safetensors slice [experts, n, k], or the upper or lower half of its rows."""
    matrix = fused[expert : expert + 1][0]
    return matrix if half is None else matrix.chunk(2)[half]


def is_expert(name: str) -> bool:
    """Whether a tensor of the model is the weight of an expert's layer."""
    return _EXPERT.fullmatch(name) is not None
