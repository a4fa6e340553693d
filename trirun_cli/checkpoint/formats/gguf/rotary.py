"""Rotary settings of a GGUF file as config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import InputError
from .metadata import Metadata

# Llama 3.1 and its kin are stored as a factor for each frequency; the numbers behind them are always these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_config(metadata: Metadata, config: Mapping[str, Any], factors: np.ndarray | None) -> dict[str, Any]:
    """``rope_theta`` and, where there is any scaling, ``rope_scaling``.

    Args:
        config: sizes. factors: ``rope_freqs``, what each frequency is divided by: fp32 [head_dim/2]; None where the
            file has none.

    Raises:
        InputError: the scaling is of a kind that is not read.
    """
    theta = metadata.number(".rope.freq_base", 10000.0)
    made: dict[str, Any] = {"rope_theta": theta}
    kind = metadata.text(".rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise InputError(f"{metadata.path}: rotary scaling of type {kind!r} and factors of frequencies as well")
        made["rope_scaling"] = _llama3(metadata, theta, config["head_dim"], factors)
    elif kind in ("linear", "yarn"):
        made["rope_scaling"] = {"rope_type": kind, "factor": metadata.number(".rope.scaling.factor")}
        if metadata.has(".rope.scaling.original_context_length"):
            made["rope_scaling"]["original_max_position_embeddings"] = metadata.count(
                ".rope.scaling.original_context_length"
            )
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if kind == "yarn" and metadata.has(f".rope.scaling.{key}"):
                made["rope_scaling"][name] = metadata.number(f".rope.scaling.{key}")
    elif kind != "none":
        raise InputError(f"{metadata.path}: rotary scaling of type {kind!r}; none, linear, yarn and Llama 3's are read")
    return made


def _llama3(metadata: Metadata, theta: float, head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3.1's settings: wavelengths below 8192/4 keep their frequency, those above 8192 have it divided by the
    factor, and between them it is blended (see ``models/rotary.py``). Proved by the stored factors."""
    factor = float(str(factors.max(initial=1.0)))
    half = head_dim // 2
    low, high, trained = (_LLAMA3[key] for key in _LLAMA3)
    turns = trained * theta ** -(np.arange(half) / half) / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (kept + (1 - kept) / factor)
    if factors.shape != (half,) or not np.allclose(factors, expected, rtol=1e-4):
        raise InputError(f"{metadata.path}: rope_freqs.weight are not the factors of Llama 3's rotary scaling")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
