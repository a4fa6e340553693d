"""Settings of config.json: its language model's, checked for being numbers of a size that something can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError

# Far more than any model has: what is made for each of them would fill the memory.
MOST_LAYERS, MOST_HEAD_DIM = 4096, 2**16
# Counts that config.json must have, counts that it may have, and numbers that it may have.
COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_COUNTS = (
    "num_key_value_heads", "head_dim", "max_position_embeddings", "global_head_dim", "num_global_key_value_heads",
)  # fmt: skip
# Where 0 stands for none.
COUNTS_OR_NONE = (
    "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "decoder_sparse_step",
    "sliding_window_pattern", "no_rope_layer_interval", "max_window_layers", "num_experts", "n_routed_experts",
    "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
NUMBERS_OR_NONE = (
    "attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "embedding_multiplier",
    "residual_multiplier", "logit_scale", "routed_scaling_factor", "partial_rotary_factor",
    "rope_local_base_freq", "swiglu_alpha",
)  # fmt: skip
OPTIONAL_NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "rope_theta", "query_pre_attn_scalar",
    "logits_scaling",
)  # fmt: skip


def text_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the language model: ``text_config`` of a model that also sees, or config.json itself.

    Raises:
        InputError: ``text_config`` is no object.
    """
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise InputError(f"config.json: text_config is {inner!r}, not an object")
    outer: dict[str, Any] = {
        name: config[name] for name in ("quantization_config", "tie_word_embeddings") if name in config
    }
    return outer | inner


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise InputError unless the sizes are there and are sizes."""
    check_counts(config, COUNTS)
    check_numbers(config, OPTIONAL_COUNTS, int)
    check_numbers(config, OPTIONAL_NUMBERS, float)
    check_numbers(config, COUNTS_OR_NONE, int, none=0)
    check_numbers(config, NUMBERS_OR_NONE, float, none=0)
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise InputError(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, above {MOST_LAYERS}")


def check_counts(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise InputError unless these entries are there and as :func:`check_numbers` wants integers."""
    missing = next((name for name in names if config.get(name) is None), None)
    if missing is not None:
        raise InputError(f"config.json has no {missing}")
    check_numbers(config, names, int)


def check_numbers(config: Mapping[str, Any], names: Sequence[str], kind: type, none: int | None = None) -> None:
    """Raise InputError unless these entries, where there are any, are positive and of a size that things can have;
    ``none``: a value that stands for no entry."""
    for name in names:
        value = config.get(name)
        if value is None or (value == none and type(value) is not bool):
            continue
        kinds = (int,) if kind is int else (int, float)
        # type(), not isinstance: true is no count.
        if type(value) not in kinds or not 0 < value < 2**40:
            what = "a positive integer" if kind is int else "a positive number"
            raise InputError(f"config.json: {name} is {value!r}, not {what}")


def layer_list(config: Mapping[str, Any], name: str) -> list[Any] | None:
    """A setting that has an entry for every layer, or None where there is none.

    Raises:
        InputError: it is no list of that length.
    """
    value = config.get(name)
    if not value:
        return None
    if not isinstance(value, list) or len(value) != config["num_hidden_layers"]:
        raise InputError(f"config.json: {name} has no entry for each of {config['num_hidden_layers']} layers")
    return value


def sliding_windows(config: Mapping[str, Any], slides: Sequence[bool]) -> list[int | None] | None:
    """The window of every layer: ``layer_types`` says which slide, or ``slides`` where there are none.

    Raises:
        InputError: the window that some layer has is no number.
    """
    kinds, window = layer_list(config, "layer_types"), config.get("sliding_window")
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(slides):
        return None
    check_numbers(config, ("sliding_window",), int)
    return [window if each else None for each in slides]
