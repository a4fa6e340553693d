"""The families that the native decoder runs: of each, what differs from Llama, as a description of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .hybrids import gated_delta_hybrid
from .parts import (
    BITNET,
    GATE_UP,
    LLAMA,
    NO_WEIGHTS,
    ONE_NORM,
    POST,
    QK_NORM,
    QK_SANDWICH,
    QKV,
    SANDWICH,
    UNGATED,
    Description,
    UnsupportedModel,
    describe,
    with_norm_biases,
)
from .settings import layer_list, sliding_windows

Config = Mapping[str, Any]
INTERLEAVED = {"interleaved": True}


def _llama(config: Config) -> Description:
    return describe(config)


def _windowed(config: Config) -> Description:
    """Mistral, whose layers all slide, and Ministral, whose ``layer_types`` say which."""
    return describe(config, windows=sliding_windows(config, [True] * config["num_hidden_layers"]))


def _ministral3(config: Config) -> Description:
    # Beyond this length queries grow with the position (Llama 4's scaling).
    rotary = config.get("rope_parameters") or {}
    grows = rotary.get("original_max_position_embeddings") if rotary.get("llama_4_scaling_beta") else None
    return replace(_windowed(config), longest=min(grows or 2**40, config.get("max_position_embeddings") or 2048))


def qwen_windows(config: Config) -> list[int | None] | None:
    """The window of every layer of a Qwen model."""
    if not config.get("use_sliding_window"):
        return None
    first = config.get("max_window_layers", 28)
    return sliding_windows(config, [index >= first for index in range(config["num_hidden_layers"])])


def _qwen2(config: Config) -> Description:
    return describe(config, windows=qwen_windows(config))


def _qwen3(config: Config) -> Description:
    return describe(config, QK_NORM, windows=qwen_windows(config))


def _bitnet(config: Config) -> Description:
    return describe(config, BITNET)


def _gemma(config: Config) -> Description:
    act = {"hidden_act": "gelu_pytorch_tanh"}
    return describe({**config, **act}, replace(LLAMA, norm_offset=1.0), embedding_scale=config["hidden_size"] ** 0.5)


def _gemma_windows(config: Config, pattern: int) -> list[int | None] | None:
    every = config.get("sliding_window_pattern") or pattern
    return sliding_windows(config, [(index + 1) % every != 0 for index in range(config["num_hidden_layers"])])


def _gemma_scales(config: Config) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common beside their norms."""
    return {
        "activation": "hidden_activation",
        "attention": {
            "scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            "softcap": config.get("attn_logit_softcapping") or 0.0,
        },
        "embedding_scale": config["hidden_size"] ** 0.5,
        "logit_softcap": config.get("final_logit_softcapping") or 0.0,
    }


def _gemma2(config: Config) -> Description:
    return describe(
        config,
        SANDWICH,
        windows=_gemma_windows(config, 2),
        **_gemma_scales(config),
    )


def _gemma3(config: Config) -> Description:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("attention to later tokens")
    windows = _gemma_windows(config, 6)
    kinds = _layer_kinds(windows)
    # Of an older config.json: local layers have a base of their own and no scaling.
    if not _nested(config):
        full = {"rope_theta": config.get("rope_theta") or 1e6, **(config.get("rope_scaling") or {})}
        local = {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
        config = {**config, "rope_parameters": {"full_attention": full, "sliding_attention": local}}
        config.pop("rope_scaling", None)
    return describe(
        config,
        QK_SANDWICH,
        windows=windows,
        rotary_kinds=kinds or ["full_attention"] * config["num_hidden_layers"],
        **_gemma_scales(config),
    )


def _layer_kinds(windows: list[int | None] | None) -> list[str]:
    """The name of every layer's rotary settings, by its window."""
    return ["sliding_attention" if window else "full_attention" for window in windows or ()]


def _nested(config: Config) -> bool:
    """Whether every kind of layer has rotary settings of its own."""
    return any(isinstance(each, dict) for each in (config.get("rope_parameters") or {}).values())


def _phi3(config: Config) -> Description:
    windows = sliding_windows(config, [True] * config["num_hidden_layers"])
    return describe(config, replace(LLAMA, fused={**QKV, **GATE_UP}), windows=windows, partial=True)


def _granite(config: Config) -> Description:
    return describe(
        config,
        attention={"scale": config.get("attention_multiplier", 1.0)},
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1 / config.get("logits_scaling", 1.0),
    )


def _glm(config: Config) -> Description:
    return describe(config, replace(LLAMA, fused=GATE_UP), partial=True, attention=INTERLEAVED)


def _glm4(config: Config) -> Description:
    vectors = {
        "attention_norm": "input_layernorm.weight",
        "attention_post_norm": "post_self_attn_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    }
    return describe(config, replace(LLAMA, vectors=vectors, fused=GATE_UP), partial=True, attention=INTERLEAVED)


def _olmo(config: Config) -> Description:
    if config.get("clip_qkv"):
        raise UnsupportedModel(f"clip_qkv {config['clip_qkv']!r}")
    return describe({**config, "rms_norm_eps": 1e-5}, NO_WEIGHTS, norm="layer")


def _olmo2(config: Config) -> Description:
    return describe(config, POST, attention={"row_norms": True})


def _olmo3(config: Config) -> Description:
    windows = _gemma_windows(config, 4)
    kinds = _layer_kinds(windows)
    if not _nested(config):
        # Of an older config.json: a scaling is that of the layers that see everything.
        plain = {"rope_theta": config.get("rope_theta") or 10000.0}
        scaled = plain | (config.get("rope_scaling") or config.get("rope_parameters") or {})
        config = {**config, "rope_parameters": {"full_attention": scaled, "sliding_attention": plain}}
        config.pop("rope_scaling", None)
    return describe(config, POST, windows=windows, rotary_kinds=kinds, attention={"row_norms": True})


def _smollm3(config: Config) -> Description:
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    turns = layer_list(config, "no_rope_layers") or [(index + 1) % every != 0 for index in range(layers)]
    windows = sliding_windows(config, [not each for each in turns]) if config.get("use_sliding_window") else None
    return describe(config, rotated=[bool(each) for each in turns], windows=windows)


def _cohere(config: Config) -> Description:
    if config.get("use_qk_norm"):
        raise UnsupportedModel("layer norms of queries and keys")
    return describe(
        config, ONE_NORM, norm="layer", eps="layer_norm_eps", parallel=True, attention=INTERLEAVED,
        logit_scale=config.get("logit_scale") or 1.0,
    )  # fmt: skip


def _cohere2(config: Config) -> Description:
    windows = _gemma_windows(config, 4)
    rotated = [window is not None for window in windows or [None] * config["num_hidden_layers"]]
    return describe(
        config, ONE_NORM, norm="layer", eps="layer_norm_eps", parallel=True, attention=INTERLEAVED, windows=windows,
        rotated=rotated, logit_scale=config.get("logit_scale") or 1.0,
    )  # fmt: skip


def _starcoder2(config: Config) -> Description:
    linears = dict(UNGATED.linears) | {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    names = with_norm_biases(replace(UNGATED, linears=linears))
    windows = sliding_windows(config, [True] * config["num_hidden_layers"])
    return describe(config, names, norm="layer", eps="norm_epsilon", gated=False, windows=windows)


def _interleaved(config: Config) -> Description:
    """Helium and Ernie 4.5."""
    return describe(config, attention=INTERLEAVED)


def _exaone4(config: Config) -> Description:
    # Where some layers slide, those that see everything do not rotate.
    layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern") or 0
    if isinstance(pattern, str):
        slides = [pattern[index % len(pattern)] == "L" for index in range(layers)]
    else:
        slides = [pattern > 0 and (index + 1) % pattern != 0 for index in range(layers)]
    windows = sliding_windows(config, slides)
    rotated = None if config.get("sliding_window") is None else [w is not None for w in windows or [None] * layers]
    return describe(config, POST, windows=windows, rotated=rotated)


def _arcee(config: Config) -> Description:
    return describe(config, UNGATED, gated=False)


def _nemotron(config: Config) -> Description:
    names = replace(with_norm_biases(UNGATED), norm_offset=1.0)
    return describe(config, names, norm="layer", eps="norm_eps", gated=False, partial=True)


def _stablelm(config: Config) -> Description:
    if config.get("qk_layernorm"):
        raise UnsupportedModel("layer norms of queries and keys")
    parallel = bool(config.get("use_parallel_residual"))
    names = with_norm_biases(ONE_NORM if parallel else LLAMA)
    if parallel:
        names = replace(names, vectors={**names.vectors, "mlp_norm_bias": "input_layernorm.bias"})
    return describe(config, names, norm="layer", eps="layer_norm_eps", parallel=parallel, partial=True)


# Model type to what makes the description, and to settings where config.json does not say them.
FAMILIES: dict[str, tuple[Callable[[Config], Description], dict[str, Any]]] = {
    "llama": (_llama, {}),
    "mistral": (_windowed, {"sliding_window": 4096}),
    "ministral": (_windowed, {"sliding_window": 4096}),
    "ministral3": (_ministral3, {"head_dim": 128}),
    "qwen2": (_qwen2, {}),
    "qwen2_vl_text": (_qwen2, {}),
    "qwen2_5_vl_text": (_qwen2, {}),
    "qwen3": (_qwen3, {"head_dim": 128}),
    "qwen3_vl_text": (_qwen3, {"head_dim": 128}),
    "qwen3_next": (
        gated_delta_hybrid,
        {
            "partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 2, "by_head": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        },
    ),
    "qwen3_5_text": (
        gated_delta_hybrid,
        {
            "partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
    ),
    "bitnet": (_bitnet, {"hidden_act": "relu2", "rope_theta": 500000.0, "rms_norm_eps": 1e-5}),
    "gemma": (_gemma, {"head_dim": 256}),
    "gemma2": (
        _gemma2,
        {
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        _gemma3, {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    ),
    "phi3": (_phi3, {"rms_norm_eps": 1e-5}),
    "granite": (_granite, {}),
    "glm": (_glm, {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2}),
    "glm4": (_glm4, {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2}),
    "olmo": (_olmo, {}),
    "olmo2": (_olmo2, {"rms_norm_eps": 1e-5}),
    "olmo3": (_olmo3, {"rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "smollm3": (_smollm3, {"num_key_value_heads": 4, "rope_theta": 2e6}),
    "cohere": (_cohere, {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}),
    "cohere2": (_cohere2, {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096}),
    "starcoder2": (_starcoder2, {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5}),
    "helium": (_interleaved, {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100000.0}),
    "ernie4_5": (_interleaved, {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
    "seed_oss": (_llama, {"head_dim": 128, "num_key_value_heads": 8}),
    "exaone4": (_exaone4, {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}),
    "arcee": (_arcee, {"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    "nemotron": (_nemotron, {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
    "stablelm": (_stablelm, {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}),
}  # fmt: skip
# A model that also sees, by the text model whose settings its older config.json has among its own.
FLAT_TEXT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
