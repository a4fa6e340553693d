"""The models on which :mod:`bench_cpu_peers` compares trirun with llama.cpp: of every family that both run, a tiny one
and one of 1 to 2 B parameters. Sizes are those of a published model, of fewer layers where that is larger.

Rows of matrices are whole blocks of TQ2_0 (256 columns).
"""

from __future__ import annotations

from typing import Any

_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip


def _sizes(*numbers: int, **more: Any) -> dict[str, Any]:
    return dict(zip(_NAMES, numbers, strict=True)) | more


TIED: dict[str, Any] = {"tie_word_embeddings": True}
_TINY = _sizes(256, 512, 4, 4, 2, 64, 8192)
_BIAS = {"attention_bias": True}
_WINDOW = {"sliding_window": 32}
_LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rope_theta": 500000.0,
}  # fmt: skip
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
_GEMMA2 = {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 256}
_SHARED = {"shared_expert_intermediate_size": 256}
_GLM4_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
    "use_qk_norm": True, "routed_scaling_factor": 1.5,
    "attention_bias": True,
}  # fmt: skip
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
          "linear_value_head_dim": 64}  # fmt: skip
_DELTA_2B = {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128}  # fmt: skip

_SLID, _FULL = "sliding_attention", "full_attention"
_GEMMA4 = TIED | {"model_type": "gemma4_text", "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
_GEMMA4_TIED = _GEMMA4 | {"attention_k_eq_v": True}
_GEMMA4_TINY = _WINDOW | {"global_head_dim": 128, "num_global_key_value_heads": 1, "layer_types": [_SLID, _FULL] * 2}
_GEMMA4_31B = {"global_head_dim": 512, "num_global_key_value_heads": 4, "sliding_window": 1024}
_GEMMA4_E = _GEMMA4 | {"hidden_size_per_layer_input": 256}
_GEMMA4_MIXED = _GEMMA4_TIED | {"enable_moe_block": True}
_OSS = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        "truncate": True,
    },
}  # fmt: skip

# By model_type, or a name of its own: what the tiny model has beside _TINY; what the other one is, and its config.json.
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llama": ({}, "Llama-3.2-1B", _sizes(2048, 8192, 16, 32, 8, 64, 128256, **TIED, **_LLAMA3)),
    "qwen2": ({}, "Qwen2.5-1.5B", _sizes(1536, 8960, 28, 12, 2, 128, 151936, **TIED)),
    "qwen3": ({}, "Qwen3-1.7B", _sizes(2048, 6144, 28, 16, 8, 128, 151936, **TIED)),
    "ministral3": ({}, "Ministral-3-3B, 10 of 26 layers", _sizes(3072, 9216, 10, 32, 8, 128, 131072, **TIED)),
    "bitnet": (
        TIED | {"hidden_act": "silu"},
        "BitNet-2B, 18 of 30 layers, SiLU",
        _sizes(2560, 6912, 18, 20, 5, 128, 128256, hidden_act="silu", **TIED),
    ),
    "gemma": (TIED, "Gemma-2B, 12 of 18 layers", _sizes(2048, 16384, 12, 8, 1, 256, 256000, **TIED)),
    "gemma2": (
        TIED | _WINDOW | {"query_pre_attn_scalar": 64},
        "Gemma-2-2B, 16 of 26 layers",
        _sizes(2304, 9216, 16, 8, 4, 256, 256000, sliding_window=4096, **TIED, **_GEMMA2),
    ),
    "gemma3_text": (
        TIED | _WINDOW | {"query_pre_attn_scalar": 64, "sliding_window_pattern": 4},
        "Gemma-3-4B, 12 of 34 layers",
        _sizes(2560, 10240, 12, 8, 4, 256, 262208, sliding_window=1024, query_pre_attn_scalar=256, **TIED),
    ),
    "gemma4_text": (
        _GEMMA4_TIED | _GEMMA4_TINY,
        "Gemma-4-31B, 3 of 60 layers",
        _sizes(5376, 21504, 3, 32, 16, 256, 32000, layer_types=[_SLID, _SLID, _FULL], **_GEMMA4_TIED, **_GEMMA4_31B),
    ),
    "gemma4_e": (
        _GEMMA4_E | _GEMMA4_TINY | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                                    "vocab_size_per_layer_input": 8192},
        "Gemma-4-E4B, 12 of 42 layers",
        _sizes(2560, 10240, 12, 8, 2, 256, 262144, num_kv_shared_layers=6, **_GEMMA4_E),
    ),
    "gemma4_moe": (
        _GEMMA4_MIXED | _GEMMA4_TINY | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256},
        "Gemma-4-26B-A4B's kind, 2 of 30 layers",
        _sizes(2816, 2048, 2, 16, 8, 256, 262144, num_experts=128, top_k_experts=8, moe_intermediate_size=768,
               layer_types=[_SLID, _FULL], **_GEMMA4_MIXED, **_GEMMA4_31B | {"num_global_key_value_heads": 2}),
    ),
    "phi3": (
        {"num_key_value_heads": 4},
        "Phi-3-mini, 12 of 32 layers",
        _sizes(3072, 8192, 12, 32, 32, 96, 32064),
    ),
    "granite": (
        _GRANITE | {"logits_scaling": 4.0},
        "Granite-3.3-2B, 24 of 40 layers",
        _sizes(2048, 8192, 24, 32, 8, 64, 49152, logits_scaling=8.0, **TIED, **_GRANITE),
    ),
    "glm": (_BIAS, "GLM-Edge-1.5B", _sizes(2048, 6144, 28, 16, 4, 128, 59264, **_BIAS)),
    "glm4": ({}, "GLM-4, sizes of GLM-Edge-1.5B", _sizes(2048, 6144, 28, 16, 4, 128, 59264)),
    "olmo": ({}, "OLMo-1B", _sizes(2048, 8192, 16, 16, 16, 128, 50304, **TIED)),
    "olmo2": ({}, "OLMo-2-1B", _sizes(2048, 8192, 16, 16, 16, 128, 100352)),
    "olmo3": (_WINDOW, "OLMo-3-7B, 6 of 32 layers", _sizes(4096, 11008, 6, 32, 32, 128, 100352)),
    "smollm3": ({}, "SmolLM3-3B, 16 of 36 layers", _sizes(2048, 11008, 16, 16, 4, 128, 128256, **TIED)),
    "cohere": (TIED, "Aya-Expanse-8B, 6 of 32 layers", _sizes(4096, 14336, 6, 32, 8, 128, 64000, **TIED)),
    "cohere2": (TIED | _WINDOW, "Command-R7B, 6 of 32 layers", _sizes(4096, 14336, 6, 32, 8, 128, 64000, **TIED)),
    "starcoder2": ({}, "StarCoder2-3B, 14 of 30 layers", _sizes(3072, 12288, 14, 24, 2, 128, 49152, **TIED)),
    "ernie4_5": ({}, "ERNIE-4.5-0.3B, twice as wide", _sizes(2048, 6144, 18, 16, 2, 128, 103424, **TIED)),
    "seed_oss": (_BIAS, "Seed-OSS-36B, 2 of 64 layers", _sizes(5120, 27648, 2, 80, 8, 128, 32000, **_BIAS)),
    "exaone4": ({"sliding_window": None}, "EXAONE-4.0-1.2B", _sizes(2048, 4096, 30, 32, 8, 64, 102400, **TIED,
                                                                      sliding_window=None)),
    "arcee": ({}, "AFM-4.5B, 12 of 36 layers", _sizes(2560, 18432, 12, 20, 4, 128, 64000)),
    "nemotron": ({}, "Minitron-4B, 12 of 32 layers", _sizes(3072, 9216, 12, 24, 8, 128, 64000)),
    "stablelm": (
        {"num_key_value_heads": 4, "use_qkv_bias": True},
        "StableLM-2-1.6B",
        _sizes(2048, 5632, 24, 32, 32, 64, 100352, use_qkv_bias=True),
    ),
    "mixtral": (
        {"num_local_experts": 8},
        "Mixtral's kind: 8 experts, 2 chosen",
        _sizes(1024, 3584, 16, 16, 8, 64, 32000, num_local_experts=8),
    ),
    "qwen3_moe": (
        _EXPERTS,
        "Qwen3-30B-A3B, 3 of 48 layers",
        _sizes(2048, 6144, 3, 32, 4, 128, 151936, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
               moe_intermediate_size=768),
    ),
    "olmoe": (
        _EXPERTS | {"norm_topk_prob": False, "num_key_value_heads": 4, "intermediate_size": 256},
        "OLMoE-1B-7B, 4 of 16 layers",
        _sizes(2048, 1024, 4, 16, 16, 128, 50304, num_experts=64, num_experts_per_tok=8),
    ),
    "glm4_moe": (
        _GLM4_MOE,
        "GLM-4.5's kind: 64 experts, 8 chosen, one shared",
        _sizes(2048, 6144, 4, 32, 4, 128, 151552, **_GLM4_MOE | {
            "n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}),
    ),
    "gpt_oss": (
        _OSS | _WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 2},
        "GPT-OSS-20B's kind, 2 of 24 layers",
        _sizes(2816, 2816, 2, 64, 8, 64, 32000, num_local_experts=32, num_experts_per_tok=4, **_OSS),
    ),
    "qwen2_moe": (
        _EXPERTS | _SHARED | {"norm_topk_prob": False},
        "Qwen1.5-MoE-A2.7B, 3 of 24 layers",
        _sizes(2048, 5632, 3, 16, 16, 128, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1536,
               shared_expert_intermediate_size=5632),
    ),
    "granitemoe": (
        _GRANITE | {"num_local_experts": 8, "intermediate_size": 256},
        "Granite-3.1-1B-A400M",
        _sizes(1024, 512, 24, 16, 8, 64, 49152, num_local_experts=32, num_experts_per_tok=8, **TIED, **_GRANITE),
    ),
    "qwen3_next": (
        _DELTA | _EXPERTS | _SHARED,
        "Qwen3-Next's kind: 64 of 512 experts, 8 of 48 layers",
        _sizes(2048, 5120, 8, 16, 2, 256, 151936, num_experts=64, num_experts_per_tok=10, moe_intermediate_size=512,
               shared_expert_intermediate_size=512, **_DELTA_2B | {"linear_num_value_heads": 32}),
    ),
    "qwen3_5_moe_text": (
        _DELTA | _EXPERTS | _SHARED,
        "Qwen3.5-35B-A3B's kind: 64 of 256 experts, 8 of 40 layers",
        _sizes(2048, 512, 8, 16, 2, 256, 151936, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=512,
               shared_expert_intermediate_size=512, **_DELTA_2B | {"linear_num_value_heads": 32}),
    ),
    "qwen3_5_text": (_DELTA, "Qwen3.5-2B", _sizes(2048, 6144, 24, 8, 2, 256, 151936, **TIED, **_DELTA_2B)),
}  # fmt: skip
# What bench_cpu_peers measures without --families, also its prompts and its memory.
DEFAULT: dict[str, Any] = _sizes(2048, 5632, 24, 16, 16, 128, 32000, model_type="llama", max_position_embeddings=2048,
                                 rms_norm_eps=1e-5)  # fmt: skip


def configs(family: str) -> dict[str, dict[str, Any]]:
    """The config.json of a family's models, by "tiny" and what the other one is called."""
    tiny, name, large = FAMILIES[family]
    own = {"model_type": family, "max_position_embeddings": 8192}
    return {"tiny": own | _TINY | tiny, name: own | large}
