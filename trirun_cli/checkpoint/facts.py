"""A packed checkpoint in numbers. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from .reader import Checkpoint


def module_facts(checkpoint: Checkpoint, module: str) -> dict[str, Any]:
    """One packed module in numbers: shape, grid, stored bits per weight, code histogram, range of |scale|."""
    w = checkpoint.codes(module)
    magnitude = np.abs(w.true_groups(w.scales)).astype(np.float32)
    return {
        "name": module,
        "n": w.n,
        "k": w.k,
        "group_size": w.spec.group_size,
        "zero": w.spec.zero,
        "bits_per_weight": w.spec.bits_per_weight(w.k),
        "bytes": checkpoint.packed_bytes(module),
        "code_shares": [round(np.count_nonzero(w.true_codes == code) / (w.n * w.k), 4) for code in range(4)],
        "scale_min": magnitude.min().item(),
        "scale_max": magnitude.max().item(),
    }


def totals(checkpoint: Checkpoint, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all modules: weights, mean bits per weight, packed bytes, bytes of everything else."""
    weights = sum(fact["n"] * fact["k"] for fact in facts)
    packed_bytes = sum(fact["bytes"] for fact in facts)
    return {
        "packed_weights": weights,
        "bits_per_weight": sum(fact["n"] * fact["k"] * fact["bits_per_weight"] for fact in facts) / weights,
        "packed_bytes": packed_bytes,
        "other_bytes": sum(file.stat().st_size for file in checkpoint.files) - packed_bytes,
    }
