"""Small random models of any family that transformers knows, as many tests make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.engine import Engine

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Every family that the native decoder runs, with settings that make its parts matter.
FOUR = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 24}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
# Experts, and one that every token goes to, by a gate.
_SHARED: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128,
}  # fmt: skip
# Heads of two sizes, of which some layers have fewer for keys and values.
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0,
}  # fmt: skip
# Of its smallest models: inputs of every layer's own, and last layers that attend to what earlier ones have stored.
GEMMA4_E: dict[str, Any] = GEMMA4 | {
    "attention_k_eq_v": False, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
    "hidden_size_per_layer_input": 48, "vocab_size_per_layer_input": 110,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HYBRID,
    "qwen3_5_text, heads of 128": _HYBRID | {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
    "qwen3_next": _HYBRID | _SHARED,
    "qwen3_next, no experts": _HYBRID | {"num_experts": 0},
    "qwen3_5_moe_text": _HYBRID | _SHARED,
    "llama": {},
    "mistral": {"head_dim": 32} | WINDOW,
    "ministral": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]} | WINDOW,
    "ministral3": {"head_dim": 32},
    "qwen2": {},
    "qwen2, windows": {"use_sliding_window": True, "max_window_layers": 1} | WINDOW,
    "qwen3": {"head_dim": 32},
    "bitnet": {},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0
    } | WINDOW,
    "gemma3_text": {"head_dim": 32, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]} | FOUR | WINDOW,
    "gemma4_text": GEMMA4,
    "gemma4_text, values apart": GEMMA4 | {"attention_k_eq_v": False, "global_head_dim": 48},
    "gemma4_text, E": GEMMA4_E,
    "gemma4_text, experts": GEMMA4 | {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 96,
    },
    "phi3": {"num_key_value_heads": 4, "intermediate_size": 192},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0
    },
    "glm": {"head_dim": 16, "intermediate_size": 192},
    "glm4": {"head_dim": 16, "intermediate_size": 192},
    "olmo": {},
    "olmo2": {},
    "olmo3": FOUR | WINDOW,
    "smollm3": FOUR,
    "smollm3, windows": {"use_sliding_window": True} | FOUR | WINDOW,
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3} | FOUR | WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _SHARED | {"norm_topk_prob": False, "mlp_only_layers": [1]},
    "granitemoe": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2, "logits_scaling": 4.0,
    },
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    } | FOUR,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    } | FOUR,
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5, "attention_bias": True,
    } | FOUR | WINDOW,
    "starcoder2": WINDOW,
    "helium": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "exaone4": FOUR | WINDOW,
    "arcee": {},
    "nemotron": {},
    "stablelm": {},
    "stablelm, parallel": {"use_parallel_residual": True},
}  # fmt: skip


# What llama.cpp computes for all models of a family, where the settings above are others.
AS_LLAMA_CPP: dict[str, dict[str, Any]] = {
    # The last layers attend to what the two before them have stored; inputs of layers are those of the vocabulary.
    "gemma4_text, E": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 8192,
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "qwen3_5_text": {"linear_value_head_dim": 16},
    "qwen3_5_text, heads of 128": {"linear_key_head_dim": 128},
    "qwen3_5_moe_text": {"linear_value_head_dim": 16},
    "qwen3_next": {"linear_value_head_dim": 16},
    "gpt_oss": {
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    },
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 4},
}


def open_engine(path: Path, *, max_waiting: int | None = None, **options: Any) -> Engine:
    """An engine on a model directory; ``options`` are those of ``open_runner``."""
    return Engine(open_runner(path, **options), max_waiting=max_waiting)


def clips_as_configured(model: Any) -> Any:
    """The model itself. transformers 5.17 clips gpt_oss at 7, whatever its ``swiglu_limit``."""
    if (limit := getattr(model.config, "swiglu_limit", None)) is not None:
        for layer in model.model.layers:
            layer.mlp.experts.limit = limit
    return model


def save_ternary(family: str, change: dict[str, Any], out: Path) -> tuple[Any, Path, Path]:
    """A model whose linear layers and experts, but for the head, are ternary, and whose norms and biases matter.

    Args:
        family: a model type of transformers. change: settings that differ from SIZES.

    Returns:
        the model in float32, its directory ``out/model``, and its packed checkpoint ``out/packed``.
    """
    from trirun_cli.workflows.pack import pack

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | change))).eval()
    clips_as_configured(model)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                factor = "norm" in name or name.endswith("scale")
                parameter.copy_(torch.rand_like(parameter) + (0.5 if factor else -0.5))
            if name.endswith("router.scale"):
                parameter.mul_(8)
            if parameter.dim() == 3 and ".experts." in name:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 2.0**-3)
            if name.endswith("_proj_bias"):
                parameter.copy_(torch.rand_like(parameter) - 0.5)
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.normal_()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(torch.randint(-1, 2, module.weight.shape) * 2.0**-3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for module in model.modules():
            # Others than that of tokens, which is scaled by more, are looked up beside it.
            if isinstance(module, torch.nn.Embedding) and module is not model.get_input_embeddings():
                module.weight.normal_(std=0.1)
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(out / "model")
    report = pack(out / "model", out / "packed")
    assert report.modules and report.exact
    return model, out / "model", out / "packed"
