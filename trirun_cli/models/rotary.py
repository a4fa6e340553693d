"""Rotary settings of config.json, and the angles that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InputError
from .settings import check_numbers

# What each rotary type cannot do without.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def rotary_parameters(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
    """Rotary settings of a config.json of any age: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``; of
    both the latter counts, as for transformers.

    Args:
        kind: of layers, where every kind has settings of its own under its name.

    Raises:
        InputError: they are no settings, or one that their type needs is missing or no number.
    """
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(stored, dict) and kind is not None and kind in stored:
        stored = stored[kind] or {}
    if not isinstance(stored, dict):
        raise InputError(f"config.json: rotary settings are {stored!r}, not an object")
    found = dict(stored)
    found["rope_type"] = found.get("rope_type", found.pop("type", None)) or "default"
    # How positions of images are told apart; those of text are one number.
    if found["rope_type"] == "mrope":
        found["rope_type"] = "default"
    found.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    found.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    trained = config.get("original_max_position_embeddings")
    if trained is not None:
        found.setdefault("original_max_position_embeddings", trained)
    found.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    needed = _NEEDED.get(found["rope_type"], ()) if isinstance(found["rope_type"], str) else ()
    for name in needed:
        if name not in found:
            raise InputError(f"config.json: rotary type {found['rope_type']} has no {name}")
    check_numbers(found, ("rope_theta", "partial_rotary_factor", *needed), float)
    if found["rope_type"] == "proportional":
        check_numbers(found, ("factor",), float)
    return found


def angles(rotary: Mapping[str, Any], half: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines float32 [positions, half] of rotary settings, attention factor included.

    Types: default (Su et al. 2021), linear (Chen et al. 2023, "Extending Context Window of LLMs via Positional
    Interpolation"), yarn (Peng et al. 2023, §3), longrope (Ding et al. 2024) within the length of the first training,
    the frequency bands of Llama 3.1, and proportional (Gemma 4), whose last pairs do not turn.
    """
    frequencies = rotary["rope_theta"] ** -(np.arange(half) / max(half, 1))
    kind, factor, attention = rotary["rope_type"], rotary.get("factor", 1.0), attention_factor(rotary)
    if kind == "linear":
        frequencies = frequencies / factor
    elif kind == "llama3":
        frequencies = llama3_frequencies(frequencies, rotary)
    elif kind == "yarn":
        frequencies = _yarn(frequencies, rotary)
    elif kind == "longrope":
        frequencies = _longrope(frequencies, rotary)
    elif kind == "proportional":
        turning = np.arange(half) < int(rotary["partial_rotary_factor"] * half)
        frequencies = np.where(turning, frequencies, 0) / (factor or 1.0)
    turned = np.outer(np.arange(positions), frequencies)
    return (np.cos(turned) * attention).astype(np.float32), (np.sin(turned) * attention).astype(np.float32)


def turned_pairs(rotary: Mapping[str, Any], head_dim: int) -> int:
    """Pairs of a head that angles are needed of: a part of them, or with "proportional" all."""
    if rotary["rope_type"] == "proportional":
        return head_dim // 2
    return int(head_dim * rotary["partial_rotary_factor"]) // 2


def attention_factor(rotary: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by. It grows with the logarithm of the stretch (yarn, eq. 22), or with the
    root of that (longrope), and is 1 for other types."""
    kind, own = rotary["rope_type"], rotary.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if own is not None:
        return float(own)
    if kind == "longrope":
        trained, factor = rotary.get("original_max_position_embeddings"), rotary.get("factor")
        if trained:
            factor = (rotary.get("max_position_embeddings") or trained) / trained
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if trained and factor and factor > 1 else 1.0
    scale, all_dimensions = rotary.get("mscale"), rotary.get("mscale_all_dim")
    if scale and all_dimensions:
        return _growth(rotary, scale) / _growth(rotary, all_dimensions)
    return _growth(rotary, 1.0)


def llama3_frequencies(frequencies: np.ndarray, rotary: Mapping[str, Any]) -> np.ndarray:
    """Frequencies that turn seldom in the trained context are divided by ``factor``, fast ones kept, others blended."""
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    turns = rotary["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / rotary["factor"])


def _longrope(frequencies: np.ndarray, rotary: Mapping[str, Any]) -> np.ndarray:
    """A factor for every frequency."""
    short = np.asarray(rotary.get("short_factor"), np.float64)
    if short.shape != frequencies.shape:
        raise InputError(f"config.json: short_factor has no number for each of {frequencies.size} frequencies")
    return frequencies / short


def _yarn(frequencies: np.ndarray, rotary: Mapping[str, Any]) -> np.ndarray:
    """Dimensions that turn often in the trained context are kept, those that turn seldom interpolated, with a linear
    ramp between (eq. 17-20)."""
    half, theta = frequencies.size, rotary["rope_theta"]
    trained = rotary.get("original_max_position_embeddings") or rotary["max_position_embeddings"]

    def dimension(turns: float) -> float:
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(rotary.get("beta_fast") or 32), dimension(rotary.get("beta_slow") or 1)
    if rotary.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    return frequencies * ((1 - ramp) + ramp / stretch(rotary))


def stretch(rotary: Mapping[str, Any]) -> float:
    """By how much the trained context is stretched: ``factor``, or what config.json says of the positions."""
    if factor := rotary.get("factor"):
        return float(factor)
    longest = rotary["max_position_embeddings"]
    return longest / (rotary.get("original_max_position_embeddings") or longest)


def _growth(rotary: Mapping[str, Any], weight: float) -> float:
    factor = stretch(rotary)
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
