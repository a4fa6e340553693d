"""The matrix shapes that benchmarks and tests share (configs/shapes.yaml)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError
from ..resources import configs_dir


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear layer: ``n`` = out_features, ``k`` = in_features, and where it comes from."""

    n: int
    k: int
    label: str

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


def load_shapes() -> dict[str, list[Shape]]:
    """Every named list of configs/shapes.yaml: "default", "cpu" and one per model."""
    import yaml

    document = yaml.safe_load((configs_dir() / "shapes.yaml").read_text())
    lists = {name: [Shape(n, k, f"{n}x{k}") for n, k in document[name]] for name in ("default", "cpu")}
    for model, layers in document["models"].items():
        lists[model] = [Shape(n, k, f"{model} {layer}") for layer, (n, k) in layers.items()]
    return lists


def parse_shapes(text: str | None, default: str) -> list[Shape]:
    """``--shapes``: a comma-separated mix of list names and NxK, without repeats; None gives the list ``default``.

    Raises:
        UsageError: a word is neither, or a size is not positive.
    """
    lists = load_shapes()
    chosen: dict[tuple[int, int], Shape] = {}
    for word in (default if text is None else text).split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", word.strip())
        if match and int(match[1]) > 0 and int(match[2]) > 0:
            found = [Shape(int(match[1]), int(match[2]), word.strip())]
        elif word.strip() in lists:
            found = lists[word.strip()]
        else:
            raise UsageError(f"--shapes {word.strip()}: neither NxK nor one of {', '.join(lists)}")
        for shape in found:
            chosen.setdefault((shape.n, shape.k), shape)
    return list(chosen.values())
