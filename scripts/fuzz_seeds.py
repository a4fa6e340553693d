"""Whole inputs that scripts/fuzz.py starts from, and what the readers of JSON are given."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from trirun_cli.checkpoint.formats.gguf.header import round_up
from trirun_cli.checkpoint.formats.gguf.types import ALIGNMENT, TYPES

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "vocab_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
MODULE = "model.layers.0.mlp.up_proj"
WIDTHS = {"U8": 1, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8}


class NoInput(Exception):
    """What was made is nothing that the reader is ever given."""


def value(raw: bytes) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise NoInput from None


def mapping(raw: bytes) -> dict[str, Any]:
    """A JSON object."""
    found = value(raw)
    if not isinstance(found, dict):
        raise NoInput
    return found


def checkpoint(raw: bytes, folder: Path) -> None:
    """Write the directory that ``{"config", "tensors": {name: [dtype, shape]}}`` says."""
    whole = value(raw)
    try:
        weights, config = safetensors_bytes(whole["tensors"]), json.dumps(whole["config"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise NoInput from None
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)


def dumped(*values: Any) -> list[bytes]:
    """Seeds of JSON."""
    return [json.dumps(value).encode() for value in values]


def safetensors_bytes(tensors: dict[str, Any], facts: Any = None) -> bytes:
    """A safetensors file of ``name: [dtype, shape]`` or ``[dtype, shape, bytes to repeat]``, with the ``facts`` of a
    state in its metadata."""
    header: dict[str, Any] = {} if facts is None else {"__metadata__": {"facts": json.dumps(facts)}}
    data = b""
    for name, (dtype, shape, *filled) in tensors.items():
        count = WIDTHS.get(dtype, 1)
        for size in shape:
            count *= size if type(size) is int else -1
        if not 0 <= count < 1 << 16:
            raise ValueError("a seed's tensor grew beyond what a file may hold here")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + count]}
        pattern = bytes(list(filled[0])) if filled else b"\x3c"
        data += (pattern * (count // max(len(pattern), 1) + 1))[:count].ljust(count, b"\0")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# GGUF's kinds of numbers, as struct has them.
GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_TEXT, GGUF_LIST = 8, 9
# Kind and value by key; the value of a list is the kind of its items and these.
GGUF_METADATA: dict[str, tuple[int, Any]] = {
    "general.architecture": (8, "llama"), "llama.embedding_length": (4, 64), "llama.attention.head_count": (4, 2),
    "llama.attention.head_count_kv": (4, 1), "llama.block_count": (4, 1), "llama.feed_forward_length": (4, 64),
    "llama.context_length": (4, 32), "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
    "tokenizer.ggml.model": (8, "llama"), "tokenizer.ggml.tokens": (9, (8, ["<s>", "a", "b", "ab"])),
    "tokenizer.ggml.scores": (9, (6, [0, -1, -2, -3])), "tokenizer.ggml.token_type": (9, (5, [3, 1, 1, 1])),
}  # fmt: skip


# Type and shape by name.
Tensors = dict[str, tuple[int, tuple[int, ...]]]
_LINEARS = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
_MLP = dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (64, 64))
_LLAMA: Tensors = (
    {"token_embd.weight": (1, (4, 64)), "output_norm.weight": (1, (64,))}
    | {f"blk.0.{name}.weight": (1, (64,)) for name in ("attn_norm", "ffn_norm")}
    | {f"blk.0.{name}.weight": (42, shape) for name, shape in (_LINEARS | _MLP).items()}
)


def gguf_value(kind: int, value: Any) -> bytes:
    """A value of GGUF's metadata."""
    if kind == GGUF_TEXT:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw
    if kind == GGUF_LIST:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(gguf_value(item, each) for each in values)
    return struct.pack("<" + GGUF_NUMBERS[kind], value)


def gguf_bytes(metadata: dict[str, tuple[int, Any]] = GGUF_METADATA, tensors: Tensors | None = None) -> bytes:
    """A GGUF file; by default a Llama of one layer with a tokenizer of four tokens."""
    parts = []
    for key, (kind, content) in metadata.items():
        parts.append(gguf_value(GGUF_TEXT, key) + struct.pack("<I", kind) + gguf_value(kind, content))
    tensors = _LLAMA if tensors is None else tensors
    data = b""
    for name, (type_id, shape) in tensors.items():
        parts.append(gguf_value(GGUF_TEXT, name) + struct.pack("<I", len(shape)))
        parts.append(struct.pack(f"<{len(shape)}QIQ", *shape[::-1], type_id, len(data)))
        # As scales of two bytes 4.3, of four 785; as codes 0, 1, 0, 1.
        data += (b"\x44" * TYPES[type_id].nbytes(shape)).ljust(round_up(TYPES[type_id].nbytes(shape), ALIGNMENT), b"\0")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(parts)
    return head.ljust(round_up(len(head), ALIGNMENT), b"\0") + data


def _directory(config: dict[str, Any], **parts: list[Any]) -> dict[str, Any]:
    return {
        "config": SIZES | {"model_type": "llama"} | config,
        "tensors": {f"{MODULE}.{p}": t for p, t in parts.items()},
    }


def _quantized(method: str, facts: dict[str, Any], **parts: list[Any]) -> dict[str, Any]:
    return _directory({"quantization_config": {"quant_method": method} | facts}, **parts)


_WEIGHTS = {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 64}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}}
FORMATS = {
    "trirun": _quantized(
        "trirun",
        {"format_version": 2, "layout": "tile64", "bits": 2, "group_size": 64, "zero": 1.0, "overrides": {MODULE:
         {"group_size": 64, "zero": 1.0}}, "padded": {MODULE: [64, 128]}, "modules_to_not_convert": ["lm_head"],
         "embeddings": [], "activation_bits": 16},
        weight=["I32", [1, 4, 128]], weight_scale=["F16", [2, 64]],
    ),
    "mlx": _directory(
        {"quantization": {"bits": 2, "group_size": 64, "mode": "affine"}},
        weight=["U32", [4, 4]], scales=["F16", [4, 1]], biases=["F16", [4, 1]],
    ),
    "bitnet": _quantized(
        "bitnet", {"linear_class": "autobitlinear", "quantization_mode": "offline", "modules_to_not_convert": ["x"]},
        weight=["U8", [16, 64], [0x24]], weight_scale=["BF16", [1]],
    ),
    "compressed_tensors": _quantized(
        "compressed-tensors", {"format": "pack-quantized", "config_groups": _GROUPS, "ignore": ["lm_head"]},
        weight_packed=["I32", [16, 4]], weight_scale=["F16", [16, 1]],
        weight_shape=["I64", [2], [16, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0]],
    ),
    "gptq": _quantized(
        "gptq", {"bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
        qweight=["I32", [4, 16]], qzeros=["I32", [1, 1]], scales=["F16", [1, 16]], g_idx=["I32", [64], [0]],
    ),
    "humming": _quantized(
        "humming", {"b_dtype": "uint2", "weight_scale_type": "group", "weight_scale_group_size": 64},
        weight=["I32", [16, 4]], weight_scale=["BF16", [16, 1]],
    ),
}  # fmt: skip
HEADER = safetensors_bytes({"a": ["F16", [2, 3]], "b": ["I32", [1]], "c": ["F32", [0]]})
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROTARY = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
CONFIGS = [
    {"model_type": "llama", "rope_scaling": ROTARY, "head_dim": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    {"model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 1, **MIXTURE},
    {"model_type": "mixtral", "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "glm4_moe", "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 4,
     "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    {"model_type": "gemma2", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
     "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2},
    {"model_type": "granitemoe", "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
     "logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4,
     "query_pre_attn_scalar": 32, "head_dim": 32},
    {"model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
     "swiglu_limit": 7.0, "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "smollm3", "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16},
    {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 0.3},
    {"model_type": "stablelm", "partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": False},
    {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "norm_topk_prob": True, **MIXTURE},
]  # fmt: skip
RECIPE = {"name": "a", "group_size": 64, "grid": "ternary", "samples": 4, "damp": 0.1, "ignore": ["lm_head"],
           "engines": ["ste"], "overrides": {"mlp": {"grid": "zero", "keep": False}}}  # fmt: skip
PROMPT = {"prompt": "a", "id": 1, "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "top_p": 0.9, "seed": 1}
ANSWER = {"index": 0, "prompt": "a", "settings": "DIGEST", "text": "b", "params": {}}
BLOCK = {"up.words": ["I32", [1, 4, 128]], "up.scales": ["F16", [2, 64]]}
_MODULE_FACTS = {
    "name": "b.up", "n": 64, "k": 128, "spec": {"group_size": 64, "zero": 1.0}, "loss": 0.1, "damp": 0.1, "dead": 0,
    "seconds": 1.0,
}  # fmt: skip
_BLOCK_REPORT = {"index": 0, "name": "b", "error": 0.1, "error_before_refine": 0.1, "resumed": False, "seconds": 1.0}
BLOCK_FACTS = {"modules": [_MODULE_FACTS], "kept": {}, "report": _BLOCK_REPORT}
TRAINING = {f"{kind}/w": ["F32", [1]] for kind in ("weights", "best", "exp_avg", "exp_avg_sq")}
TRAIN_FACTS = {
    "step": 1, "updates": 1, "best": 1, "seconds": 1.0, "others": 1.0, "scaler": {},
    "evaluations": [{"step": 1, "kl": 0.1, "nll": 0.1}],
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "a"}, {"type": "Replace", "pattern": {"String": " "}, "content": "a"}]},
    "added_tokens": [{"id": 1, "content": "b", "single_word": False, "lstrip": False, "rstrip": False, "normalized":
    False, "special": True}], "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
    "use_regex": True}, "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id":
    0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens":
    {}}, "decoder": {"type": "ByteLevel",
    "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
    "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}  # fmt: skip
