"""How the step kernel's work is divided among clusters of CTAs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate


def divide(qkv: int, hidden: int, gated: int, depth: Mapping[str, int], clusters: int) -> tuple[tuple[int, ...], ...]:
    """Divides whole units so that every cluster streams about the same number of bytes.

    Args:
        qkv, hidden, gated: units of 64 outputs of qkv, of o and down, and of pairs of them of gate_up.
        depth: k tiles of "qkv", "o", "gate_up" and "down".

    Returns:
        of qkv, o, gate_up and down, the first unit of every cluster, and the end. None has more than it must.
    """
    counts = {"hidden": _even(hidden, clusters), "gated": [gated // clusters] * clusters}
    loads = [count * (depth["o"] + depth["down"]) for count in counts["hidden"]]
    loads = [load + count * 2 * depth["gate_up"] for load, count in zip(loads, counts["gated"], strict=True)]
    for name, left, cost in (("gated", gated % clusters, 2 * depth["gate_up"]), ("qkv", qkv, depth["qkv"])):
        of = counts.setdefault(name, [0] * clusters)
        # No cluster has more than another needs to: a phase lasts as long as its largest share.
        most = -(-(sum(of) + left) // clusters)
        for _ in range(left):
            best = min((i for i in range(clusters) if of[i] < most), key=loads.__getitem__)
            of[best] += 1
            loads[best] += cost
    starts = {name: tuple(accumulate(of, initial=0)) for name, of in counts.items()}
    return starts["qkv"], starts["hidden"], starts["gated"], starts["hidden"]


def _even(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]
