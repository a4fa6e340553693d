"""A packed checkpoint in numbers."""

from __future__ import annotations

from typing import Any

import torch
from trirun_kernels import unpack

from .reader import Checkpoint


def module_facts(checkpoint: Checkpoint, module: str) -> dict[str, Any]:
    """One packed module in numbers: shape, grid, stored bits per weight, code histogram, range of |scale|."""
    w = checkpoint.packed(module)
    codes, scales, _ = unpack(w)
    shares = torch.bincount(codes.flatten(), minlength=4).double() / codes.numel()
    magnitude = scales.float().abs()
    return {
        "name": module,
        "n": w.n,
        "k": w.k,
        "group_size": w.spec.group_size,
        "zero": w.spec.zero,
        "bits_per_weight": w.spec.bits_per_weight(w.k),
        "bytes": w.nbytes,
        "code_shares": [round(share, 4) for share in shares.tolist()],
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
