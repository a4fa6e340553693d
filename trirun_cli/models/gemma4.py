"""Gemma 4's text models: layers of two kinds, whose heads differ in size; experts in some models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InputError
from .experts import with_experts
from .parts import QK_SANDWICH, Description, MixtureNames, UnsupportedModel, describe
from .settings import check_counts, check_numbers, layer_list

Config = Mapping[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
ROTARY = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# By its fields in config.json, what a layer may have of its own.
OWN = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
VECTORS = {**QK_SANDWICH.vectors, "v_norm": None, "output_scale": "layer_scalar"}
NAMES = replace(QK_SANDWICH, vectors=VECTORS, norm_offset=0.0)
# With experts: the dense part is the shared one, and each of the two has norms of its own.
MIXED = replace(
    NAMES,
    vectors={
        **VECTORS, "mlp_norm": "pre_feedforward_layernorm_2.weight", "shared_norm": "pre_feedforward_layernorm.weight",
        "shared_post_norm": "post_feedforward_layernorm_1.weight",
        "experts_post_norm": "post_feedforward_layernorm_2.weight",
    },
    mixture=MixtureNames(
        experts="experts", router="router.proj.weight", linear_router=True, router_scale="router.scale",
        expert_scale="router.per_expert_scale",
        shared={name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    ),
)  # fmt: skip


def _gemma4(config: Config) -> Description:
    if config.get("hidden_size_per_layer_input"):
        raise UnsupportedModel("an embedding for every layer (hidden_size_per_layer_input)")
    if config.get("num_kv_shared_layers"):
        raise UnsupportedModel("layers that share keys and values (num_kv_shared_layers)")
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("attention to later tokens")
    kinds = _kinds(config)
    check_counts(config, ("sliding_window",))
    own = [_own_sizes(config, index, kind) for index, kind in enumerate(kinds)]
    if config.get("attention_k_eq_v"):
        own = [{**each, "tied_values": kind == FULL} for each, kind in zip(own, kinds, strict=True)]
    # An older setting, which counts for no model of this family.
    settings = {name: value for name, value in config.items() if name != "rope_scaling"}
    settings["rope_parameters"] = config.get("rope_parameters") or ROTARY
    if lost := sorted(set(kinds) - set(settings["rope_parameters"])):
        raise InputError(f"config.json: rope_parameters has no {lost[0]}")
    mixed = bool(config.get("enable_moe_block"))
    windows = [config["sliding_window"] if kind == SLIDING else None for kind in kinds]
    found = describe(
        settings, MIXED if mixed else NAMES, windows=windows, rotary_kinds=kinds, partial=True,
        activation="hidden_activation", attention={"scale": 1.0}, own_attention=own,
        embedding_scale=config["hidden_size"] ** 0.5, logit_softcap=config.get("final_logit_softcapping") or 0.0,
    )  # fmt: skip
    return _with_experts(found, config) if mixed else found


def _with_experts(found: Description, config: Config) -> Description:
    """With experts beside every layer's feed-forward part, which is the one that every row goes to."""
    names = {"num_experts": "num_experts", "num_experts_per_tok": "top_k_experts"}
    check_counts(config, tuple(names.values()))
    own = {name: config[setting] for name, setting in names.items()}
    own["moe_intermediate_size"] = config.get("moe_intermediate_size")
    return with_experts(found, own, size="moe_intermediate_size", shared=config["intermediate_size"], normalize=True)


def _kinds(config: Config) -> list[str]:
    """Of every layer, which of two kinds it is; the last one sees everything."""
    layers = config["num_hidden_layers"]
    kinds = layer_list(config, "layer_types") or [FULL if index % 6 == 5 else SLIDING for index in range(layers)]
    if other := next((kind for kind in kinds if kind not in (SLIDING, FULL)), None):
        raise UnsupportedModel(f"layers of the type {other!r}")
    return [*kinds[:-1], FULL]


def _own_sizes(config: Config, index: int, kind: str) -> dict[str, Any]:
    """A layer's own sizes: of ``per_layer_config``, which transformers writes, or else those that are said of all
    layers that see everything."""
    stored = config.get("per_layer_config")
    if stored is None:
        sizes = {"head_dim": config.get("global_head_dim") or 512} if kind == FULL else {}
        if kind == FULL and config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    else:
        sizes = stored.get(str(index)) or {}
    if other := next((name for name in sizes if name not in OWN), None):
        raise UnsupportedModel(f"layers with a {other} of their own")
    check_numbers(sizes, tuple(OWN), int)
    return {OWN[name]: value for name, value in sizes.items() if value is not None}


# As of families.FAMILIES.
GEMMA4: dict[str, tuple[Callable[[Config], Description], dict[str, Any]]] = {
    "gemma4_text": (
        _gemma4,
        {
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
