"""How the step kernel's work is divided among clusters of two CTAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Division:
    """Which tiles every cluster of two CTAs has.

    Attributes:
        starts: of qkv, o and down, down again, and gate_up's pairs: first n tile of every cluster, and the end.
        max_tiles: of o and down, of one cluster.
    """

    starts: tuple[tuple[int, ...], ...]
    max_tiles: int


def divide(qkv: int, hidden: int, pairs: int, depth: Mapping[str, int], clusters: int) -> Division:
    """Divides whole tiles so that every cluster streams about the same number of bytes.

    Args:
        qkv, hidden, pairs: n tiles of qkv, of o and down, and pairs of gate_up's.
        depth: k tiles of "qkv", "o", "gate_up" and "down".
    """
    counts = {"hidden": _even(hidden, clusters), "pairs": [pairs // clusters] * clusters}
    loads = [count * (depth["o"] + depth["down"]) for count in counts["hidden"]]
    loads = [load + count * 2 * depth["gate_up"] for load, count in zip(loads, counts["pairs"], strict=True)]
    for name, left, cost in (("pairs", pairs % clusters, 2 * depth["gate_up"]), ("qkv", qkv, depth["qkv"])):
        of = counts.setdefault(name, [0] * clusters)
        # No cluster has more than another needs to: a phase lasts as long as its largest share.
        most = -(-(sum(of) + left) // clusters)
        for _ in range(left):
            best = min((i for i in range(clusters) if of[i] < most), key=loads.__getitem__)
            of[best] += 1
            loads[best] += cost
    starts = {name: _starts(of) for name, of in counts.items()}
    every = (starts["qkv"], starts["hidden"], starts["pairs"], starts["hidden"])
    return Division(every, max(counts["hidden"]))


def _even(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))
