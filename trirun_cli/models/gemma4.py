"""Gemma 4's text models: layers of two kinds, whose heads differ in size; of the smallest models every layer has an
input of its own, and the last ones attend to the keys and values of others; experts in some models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .experts import with_experts
from .parts import QK_SANDWICH, Description, MixtureNames, TensorNames, UnsupportedModel, describe
from .settings import check_counts, check_numbers, layer_list

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import LayerInputs

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
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("attention to later tokens")
    kinds = _kinds(config)
    check_counts(config, ("sliding_window",))
    check_numbers(config, ("num_kv_shared_layers", "hidden_size_per_layer_input"), int, none=0)
    inputs, sources = _inputs(config), _sources(config, kinds)
    ffn, wide = config["intermediate_size"], 2 if config.get("use_double_wide_mlp") else 1
    own = _own_sizes(config, kinds)
    if config.get("attention_k_eq_v"):
        own = [{**each, "tied_values": kind == FULL} for each, kind in zip(own, kinds, strict=True)]
    own = [{**each, "shared_with": source} for each, source in zip(own, sources, strict=True)]
    # An older setting, which counts for no model of this family.
    settings = {name: value for name, value in config.items() if name != "rope_scaling"}
    settings["rope_parameters"] = config.get("rope_parameters") or ROTARY
    if lost := sorted(set(kinds) - set(settings["rope_parameters"])):
        raise InputError(f"config.json: rope_parameters has no {lost[0]}")
    mixed = bool(config.get("enable_moe_block"))
    if mixed and wide > 1 and any(source is not None for source in sources):
        raise UnsupportedModel("experts and feed-forward parts of several sizes")
    names = MIXED if mixed else NAMES
    found = describe(
        settings, _with_inputs(names) if inputs else names, inputs=inputs, partial=True, activation="hidden_activation",
        windows=[config["sliding_window"] if kind == SLIDING else None for kind in kinds], rotary_kinds=kinds,
        attention={"scale": 1.0}, own_attention=own, widths=[ffn if each is None else wide * ffn for each in sources],
        embedding_scale=config["hidden_size"] ** 0.5, logit_softcap=config.get("final_logit_softcapping") or 0.0,
    )  # fmt: skip
    return _with_experts(found, config) if mixed else found


def _with_inputs(names: TensorNames) -> TensorNames:
    """The names of a model whose layers have inputs of their own."""
    return replace(
        names,
        linears={**names.linears, "input_gate": "per_layer_input_gate", "input_out": "per_layer_projection"},
        vectors={**names.vectors, "input_norm": "post_per_layer_input_norm.weight"},
        inputs={
            "table": "embed_tokens_per_layer",
            "projection": "per_layer_model_projection",
            "norm": "per_layer_projection_norm.weight",
        },
    )


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


def _sources(config: Config, kinds: Sequence[str]) -> list[int | None]:
    """Of every layer, the one whose keys and values it attends to, None where these are its own: of the last
    ``num_kv_shared_layers`` that is the last layer of their kind before them."""
    first = len(kinds) - (config.get("num_kv_shared_layers") or 0)
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if lost := sorted(set(kinds) - set(last)):
        raise InputError(f"config.json: num_kv_shared_layers leaves no {lost[0]} with keys and values of its own")
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]


def _inputs(config: Config) -> LayerInputs | None:
    """How every layer's own input is made, or None where there is none."""
    from trirun_kernels.decoder.shape import LayerInputs

    size = config.get("hidden_size_per_layer_input")
    if not size:
        return None
    check_counts(config, ("vocab_size_per_layer_input",))
    vocab = config["vocab_size_per_layer_input"]
    if size % 16 or vocab < config["vocab_size"]:
        raise UnsupportedModel(f"inputs of layers of {size} elements, made for {vocab} tokens")
    return LayerInputs(size, vocab, size**0.5, config["hidden_size"] ** -0.5, 2**-0.5)


def _own_sizes(config: Config, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Every layer's own sizes: of ``per_layer_config``, which transformers writes, or else those that are said of all
    layers that see everything."""
    stored = config.get("per_layer_config")
    if stored is None:
        full = {"head_dim": config.get("global_head_dim") or 512}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            full["num_key_value_heads"] = config["num_global_key_value_heads"]
        sizes = [full if kind == FULL else {} for kind in kinds]
    else:
        # Layers by their number, with zeros in front: "05".
        numbered = {int(key): value for key, value in stored.items()}
        sizes = [numbered.get(index) or {} for index in range(len(kinds))]
    for each in sizes:
        if other := next((name for name in each if name not in OWN), None):
            raise UnsupportedModel(f"layers with a {other} of their own")
        check_numbers(each, tuple(OWN), int)
    return [{OWN[name]: value for name, value in each.items() if value is not None} for each in sizes]


# As of families.FAMILIES.
GEMMA4: dict[str, tuple[Callable[[Config], Description], dict[str, Any]]] = {
    "gemma4_text": (
        _gemma4,
        {
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
}  # fmt: skip
