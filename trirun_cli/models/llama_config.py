"""Which models the native decoder runs, and their sizes and rotary angles, read from config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError

if TYPE_CHECKING:
    from trirun_kernels.decoder.weights import DecoderShape

# Model type to what differs from Llama when config.json does not say it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "bitnet": {"hidden_act": "relu2", "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
}
GPU_DTYPES = ("float16", "bfloat16")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
# Counts that config.json must have, counts that it may have, and numbers that it may have.
_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_OPTIONAL_NUMBERS = ("rms_norm_eps", "rope_theta")
# What each rotary type cannot do without.
_ROTARY_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
# Longer contexts are for the asking; a cache of this length is at hand without a thought.
DEFAULT_CONTEXT = 8192


class UnsupportedModel(ValueError):
    """Why the native decoder does not run a model, in its message; transformers' own modelling can run it."""


def decoder_shape(config: dict[str, Any]) -> DecoderShape:
    """The sizes of a model from its config.json.

    Raises:
        UnsupportedModel: the model is of another family, or uses something that the native decoder does not have.
        InputError: a size is missing or is none.
    """
    from trirun_kernels.decoder.weights import DecoderShape

    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnsupportedModel(f"the native decoder runs {', '.join(FAMILIES)}, not {family}")
    config = FAMILIES[family] | config
    _check_sizes(config)
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads or hidden % 16:
        raise UnsupportedModel(f"{heads} heads over {kv_heads} key-value heads, hidden size {hidden}")
    rotary = rotary_parameters(config)
    if rotary["rope_type"] not in ROTARY_TYPES:
        raise UnsupportedModel(f"rotary type {rotary['rope_type']!r} is not one of {', '.join(ROTARY_TYPES)}")
    if rotary["partial_rotary_factor"] != 1:
        # Of these families transformers turns the whole head for some rotary types and a part of it for others.
        raise UnsupportedModel(f"partial_rotary_factor {rotary['partial_rotary_factor']!r}")
    return DecoderShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        rotary_half=head_dim // 2,
        norm_eps=config.get("rms_norm_eps") or 1e-6,
        attention_scale=head_dim**-0.5,
        activation=ACTIVATIONS[activation],
    )


def gpu_decoder_shape(config: dict[str, Any]) -> DecoderShape:
    """:func:`decoder_shape` of a model that the native decoder runs on a GPU too.

    Raises:
        UnsupportedModel, InputError: as there; or its kernels do not take these sizes.
    """
    shape = decoder_shape(config)
    if shape.ffn % 16 or shape.head_dim % 8 or shape.head_dim > 256:
        raise UnsupportedModel(f"feed-forward size {shape.ffn} and head size {shape.head_dim}")
    return shape


def gpu_dtype(config: dict[str, Any], dtype: str) -> str:
    """What the native decoder computes a model in on a GPU, "float16" or "bfloat16": the --dtype that is given, or with
    "auto" the checkpoint's own, float16 for one in float32.

    Raises:
        UnsupportedModel: it is not one of 16 bits.
    """
    if dtype == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch.")
        dtype = own if own in GPU_DTYPES else "float16"
    if dtype not in GPU_DTYPES:
        raise UnsupportedModel(f"the native decoder computes in float16 or bfloat16 on a GPU, not {dtype}")
    return dtype


def longest_context(config: dict[str, Any]) -> int:
    """Positions the model can attend to at once: its trained length, or its sliding window where that is shorter,
    because within one window sliding attention is plain attention."""
    config = _without_idle_window(_with_family(config))
    _check_numbers(config, _OPTIONAL_COUNTS, int)
    longest, window = config.get("max_position_embeddings") or 2048, config.get("sliding_window")
    return min(longest, window) if window else longest


def chosen_context(config: dict[str, Any], asked: int | None) -> int:
    """The positions of a sequence: those asked for, or the model's own, at most :data:`DEFAULT_CONTEXT`.

    Raises:
        UnsupportedModel: the model does not attend to as many at once.
    """
    longest = longest_context(config)
    if asked is not None and asked > longest:
        raise UnsupportedModel(f"a context of {asked} positions; the model attends to {longest} at once")
    return min(longest, DEFAULT_CONTEXT) if asked is None else asked


def rotary_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config.json of any age: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``; of
    both the latter counts, as for transformers.

    Raises:
        InputError: they are no settings, or one that their type needs is missing or no number.
    """
    config = _with_family(config)
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stored, dict):
        raise InputError(f"config.json: rotary settings are {stored!r}, not an object")
    found = dict(stored)
    found["rope_type"] = found.get("rope_type", found.pop("type", None)) or "default"
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    needed = _ROTARY_NUMBERS.get(found["rope_type"], ()) if isinstance(found["rope_type"], str) else ()
    for name in needed:
        if name not in found:
            raise InputError(f"config.json: rotary type {found['rope_type']} has no {name}")
    _check_numbers(found, ("rope_theta", "partial_rotary_factor", *needed), float)
    return found


def _with_family(config: dict[str, Any]) -> dict[str, Any]:
    family = config.get("model_type")
    return (FAMILIES.get(family, {}) if isinstance(family, str) else {}) | config


def _without_idle_window(config: dict[str, Any]) -> dict[str, Any]:
    """The config, with no sliding window where no layer uses the one it names, which may then be any number."""
    if config.get("layer_types"):
        slides = "sliding_attention" in config["layer_types"]
    else:
        slides = config.get("use_sliding_window", False)
    # Mistral's has no flag: it is in every layer.
    return config if slides or config.get("model_type") == "mistral" else config | {"sliding_window": None}


def _check_sizes(config: dict[str, Any]) -> None:
    missing = next((name for name in _COUNTS if config.get(name) is None), None)
    if missing is not None:
        raise InputError(f"config.json has no {missing}")
    _check_numbers(_without_idle_window(config), (*_COUNTS, *_OPTIONAL_COUNTS), int)
    _check_numbers(config, _OPTIONAL_NUMBERS, float)


def _check_numbers(config: dict[str, Any], names: Sequence[str], kind: type) -> None:
    """That these entries, where there are any, are positive and of a size that something can have."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        kinds = (int,) if kind is int else (int, float)
        # type(), not isinstance: true is no count.
        if type(value) not in kinds or not 0 < value < 2**40:
            what = "a positive integer" if kind is int else "a positive number"
            raise InputError(f"config.json: {name} is {value!r}, not {what}")


def rotary_angles(config: dict[str, Any], positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines float32 [positions, rotary_half] of a model's rotary embedding, attention factor included.

    Types: default (Su et al. 2021), linear (Chen et al. 2023, "Extending Context Window of LLMs via Positional
    Interpolation"), yarn (Peng et al. 2023, §3), and the frequency bands of Llama 3.1.
    """
    shape, rotary = decoder_shape(config), rotary_parameters(config)
    half, theta = shape.rotary_half, rotary["rope_theta"]
    frequencies = theta ** -(np.arange(half) / max(half, 1))
    kind, factor, attention = rotary["rope_type"], rotary.get("factor", 1.0), 1.0
    if kind == "linear":
        frequencies = frequencies / factor
    elif kind == "llama3":
        frequencies = llama3_frequencies(frequencies, rotary)
    elif kind == "yarn":
        frequencies, attention = _yarn(frequencies, rotary, config)
    angles = np.outer(np.arange(positions), frequencies)
    return (np.cos(angles) * attention).astype(np.float32), (np.sin(angles) * attention).astype(np.float32)


def llama3_frequencies(frequencies: np.ndarray, rotary: dict[str, Any]) -> np.ndarray:
    """Frequencies that turn seldom in the trained context are divided by ``factor``, fast ones kept, others blended."""
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    turns = rotary["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / rotary["factor"])


def _yarn(frequencies: np.ndarray, rotary: dict[str, Any], config: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Dimensions that turn often in the trained context are kept, those that turn seldom interpolated, with a linear
    ramp between; the attention factor grows with the logarithm of the stretch (eq. 17-22)."""
    half, theta = frequencies.size, rotary["rope_theta"]
    trained = rotary.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rotary.get("factor") or config["max_position_embeddings"] / trained

    def dimension(turns: float) -> float:
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(rotary.get("beta_fast") or 32), dimension(rotary.get("beta_slow") or 1)
    if rotary.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    attention = rotary.get("attention_factor")
    if attention is None:
        scale, all_dimensions = rotary.get("mscale"), rotary.get("mscale_all_dim")

        def growth(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        attention = growth(scale) / growth(all_dimensions) if scale and all_dimensions else growth(1.0)
    return frequencies * ((1 - ramp) + ramp / factor), attention
