"""A tiny random model of any family of transformers: the sizes that families.py gives to each."""

from __future__ import annotations

from typing import Any

import torch

MOST_PARAMETERS = 30e6
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Taken over where a family's config knows the name: few small experts, small states.
PARTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "expert_ffn_hidden_size": 64,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [],
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 32,
    "ffn_hidden_size": 128,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 8192,
}
# Of what sees beside the language model.
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "global_head_dim": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
}
# What a family needs beside that; of one with several models, its language model.
NEEDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 16},
    "ctrl": {"dff": 128},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "falcon": {"head_dim": None, "new_decoder_architecture": False, "multi_query": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 32},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 32},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "moshi": {"ffn_dim": 256},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2},
    "nemotron_h": {
        "num_hidden_layers": None,
        "moe_shared_expert_intermediate_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_model(family: str) -> Any:
    """A random model of a family, small where its config lets it be.

    Raises:
        ValueError: it stays too large. Whatever else transformers raises for these sizes.
    """
    from transformers import AutoConfig

    known = AutoConfig.for_model(family)
    parts = {name: part for name in known.sub_configs if (part := getattr(known, name, None)) is not None}
    if "text_config" in parts:
        made = {name: _sizes(part, VISION) for name, part in parts.items() if name != "text_config"}
        config = AutoConfig.for_model(family, text_config=_sizes(parts["text_config"], SIZES | PARTS), **made)
        return _random(config)
    if getattr(known, "is_encoder_decoder", False) or getattr(known, "is_decoder", None) is False:
        raise ValueError("an encoder, or a decoder that needs one")
    return _random(AutoConfig.for_model(family, **_sizes(known, PARTS, SIZES)))


def _sizes(known: Any, where_known: dict[str, Any], always: dict[str, Any] | None = None) -> dict[str, Any]:
    """Settings for a config: those of ``where_known`` whose names it has, and what the family needs."""
    found = {name: value for name, value in where_known.items() if getattr(known, name, None) is not None}
    if getattr(known, "kv_lora_rank", None) is not None:
        found["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention has a key for every head
    needs = NEEDS.get(known.model_type, {})
    return {name: value for name, value in ((always or {}) | found | needs).items() if value is not None}


def _random(config: Any) -> Any:
    """A model with random weights, in float32."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} M parameters with these sizes")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
