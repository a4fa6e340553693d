"""The families of mixtures of experts that the native decoder runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .experts import GATED_SHARED, layers_with_experts, with_experts, with_shared_expert
from .families import granite, qwen_windows
from .parts import (
    LLAMA,
    QK_NORM,
    Description,
    MixtureNames,
    UnsupportedModel,
    describe,
)
from .settings import check_numbers, sliding_windows

Config = Mapping[str, Any]


def _mixtral(config: Config) -> Description:
    windows = sliding_windows(config, [True] * config["num_hidden_layers"])
    names = replace(LLAMA, mixture=MixtureNames(router="block_sparse_moe.gate.weight"))
    return with_experts(describe(config, names, windows=windows), config, experts="num_local_experts")


def _qwen2_moe(config: Config) -> Description:
    found = describe(config, replace(LLAMA, mixture=GATED_SHARED), windows=qwen_windows(config))
    return with_shared_expert(found, config)


def _qwen3_moe(config: Config) -> Description:
    found = describe(config, QK_NORM, windows=qwen_windows(config))
    return with_experts(found, config, size="moe_intermediate_size", layers=layers_with_experts(config))


def _granitemoe(config: Config) -> Description:
    mixture = MixtureNames(experts="block_sparse_moe.experts", router="block_sparse_moe.router.layer.weight")
    found = granite(config)
    found = replace(found, names=replace(found.names, mixture=mixture))
    # The softmax is that of the chosen logits.
    return with_experts(found, config, experts="num_local_experts", normalize=True)


def _olmoe(config: Config) -> Description:
    if config.get("clip_qkv"):
        raise UnsupportedModel(f"clip_qkv {config['clip_qkv']!r}")
    return with_experts(describe(config, QK_NORM, attention={"row_norms": True}), config)


def _glm4_moe(config: Config) -> Description:
    first, layers = config.get("first_k_dense_replace") or 0, config["num_hidden_layers"]
    shared = {name: f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    mixture = MixtureNames(correction="mlp.gate.e_score_correction_bias", shared=shared)
    names = replace(QK_NORM if config.get("use_qk_norm") else LLAMA, mixture=mixture)
    return with_experts(
        describe(config, names, partial=True), config, experts="n_routed_experts", size="moe_intermediate_size",
        layers=[index >= first for index in range(layers)],
        shared=(config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0),
        score="sigmoid",
    )  # fmt: skip


def _gpt_oss(config: Config) -> Description:
    # The kernels have these numbers of the activation; only the limit differs between models.
    if (alpha := config.get("swiglu_alpha", 1.702)) != 1.702 or config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {config.get('hidden_act')!r} with swiglu_alpha {alpha!r}")
    check_numbers(config, ["swiglu_limit"], float)
    layers = config["num_hidden_layers"]
    names = replace(
        LLAMA, vectors={**LLAMA.vectors, "sinks": "self_attn.sinks"},
        mixture=MixtureNames(router="mlp.router.weight", bias="mlp.router.bias"),
    )  # fmt: skip
    windows = sliding_windows(config, [index % 2 == 0 for index in range(layers)])
    return with_experts(
        describe(config, names, windows=windows, attention={"sinks": True}), config,
        experts="num_local_experts", normalize=True, activation="clipped_swiglu", limit=float(config["swiglu_limit"]),
    )  # fmt: skip


# As :data:`.families.FAMILIES`.
MIXTURES: dict[str, tuple[Callable[[Config], Description], dict[str, Any]]] = {
    "mixtral": (_mixtral, {"num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen2_moe": (
        _qwen2_moe,
        {
            "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "granitemoe": (_granitemoe, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        _qwen3_moe, {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "olmoe": (
        _olmoe, {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
    ),
    "gpt_oss": (
        _gpt_oss,
        {
            "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
            "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        },
    ),
    "glm4_moe": (
        _glm4_moe,
        {
            "head_dim": 128, "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
        },
    ),
}  # fmt: skip
