"""What scripts/fuzz.py feeds as a whole: packed checkpoints, which the CPU's decoder opens and runs; GGUF files of all
types, of a mixture, and in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz_seeds import GGUF_METADATA, MIXTURE, SIZES, TOKENIZER, Tensors, checkpoint, dumped, gguf_bytes

_VOCABULARY = SIZES["vocab_size"]
_LAYER = "model.layers.0."
_OUTER = {"model.embed_tokens.weight": [_VOCABULARY, 64], "model.norm.weight": [64]}
_OUTER["lm_head.weight"] = _OUTER["model.embed_tokens.weight"]
_NORMS = {f"{_LAYER}{name}_layernorm.weight": [64] for name in ("input", "post_attention")}
_HEADS = {f"{_LAYER}self_attn.{name}_norm.weight": [32] for name in "qk"}
_ATTENTION = {f"{_LAYER}self_attn.{name}_proj": (32 if name in "kv" else 64, 64) for name in "qkvo"}
_MLP = {f"{_LAYER}mlp.{name}_proj": (64, 128) if name == "down" else (128, 64) for name in ("gate", "up", "down")}
_FUSED = {
    f"{_LAYER}self_attn.qkv_proj": (192, 64), f"{_LAYER}self_attn.o_proj": (64, 64),
    f"{_LAYER}mlp.gate_up_proj": (256, 64), f"{_LAYER}mlp.down_proj": (64, 128),
}  # fmt: skip
_EXPERTS = {f"{_LAYER}mlp.experts.{i}.{name}": (64, 64) for i in range(4) for name in ("gate", "up", "down")}
_DELTA = {
    "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"],
}  # fmt: skip
_DELTA_LINEARS = {
    f"{_LAYER}linear_attn.{name}": shape
    for name, shape in {"in_proj_qkv": (128, 64), "in_proj_z": (64, 64), "out_proj": (64, 64)}.items()
}
_DELTA_FLOATS = {
    f"{_LAYER}linear_attn.{name}": shape
    for name, shape in {
        "in_proj_b.weight": [2, 64], "in_proj_a.weight": [2, 64], "conv1d.weight": [128, 1, 4], "A_log": [2],
        "dt_bias": [2], "norm.weight": [32],
    }.items()
}  # fmt: skip


def _packed(changes: dict[str, Any], linears: dict[str, tuple[int, int]], floats: dict[str, list[int]]) -> Any:
    """A directory as ``{"config", "tensors"}``: ``linears`` of these [n, k] packed, ``floats`` of these shapes."""
    tensors: dict[str, Any] = {name: ["F16", shape] for name, shape in floats.items()}
    padded = {}
    for module, (n, k) in linears.items():
        tiles, blocks = -(-n // 64), -(-k // 128)
        tensors[f"{module}.weight"] = ["I32", [tiles, 4 * blocks, 128], [0x24]]
        tensors[f"{module}.weight_scale"] = ["F16", [2 * blocks, 64 * tiles], [0, 0x24]]
        if n % 64 or k % 128:
            padded[module] = [n, k]
    grid = {
        "quant_method": "trirun", "format_version": 2, "layout": "tile64", "bits": 2, "group_size": 64, "zero": 1.0,
        "overrides": {}, "padded": padded, "modules_to_not_convert": ["lm_head"], "embeddings": [],
        "activation_bits": 16,
    }  # fmt: skip
    config = SIZES | {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": grid} | changes
    return {"config": config, "tensors": tensors}


CHECKPOINTS = [
    _packed({"rope_theta": 1e4, "activation_bits": 8}, _ATTENTION | _MLP, _OUTER | _NORMS),
    _packed({"model_type": "phi3", "num_key_value_heads": 2}, _FUSED, _OUTER | _NORMS),
    _packed(
        {"model_type": "qwen3_moe", "head_dim": 32, **MIXTURE}, _ATTENTION | _EXPERTS,
        _OUTER | _NORMS | _HEADS | {f"{_LAYER}mlp.gate.weight": [4, 64]},
    ),
    _packed(_DELTA, _DELTA_LINEARS | _MLP, _OUTER | _NORMS | _DELTA_FLOATS),
]  # fmt: skip


def decoder(raw: bytes, folder: Path) -> None:
    """A packed checkpoint as ``{"config", "tensors"}``, opened by the native decoder of the CPU: three tokens read, and
    two written after them."""
    from trirun_cli.backends.registry import open_runner
    from trirun_cli.engine.engine import Engine
    from trirun_cli.engine.request import Request
    from trirun_cli.engine.sampling import SamplingParams
    from trirun_cli.errors import InputError

    checkpoint(raw, folder)
    engine = Engine(open_runner(folder, device="cpu", engine="native", slots=1, context=8, threads=1))
    try:
        request = Request("0", (1, _VOCABULARY - 1, 3), SamplingParams(max_tokens=2, temperature=1.0, seed=0))
        for event in engine.generate([request]):
            if event.error is not None:
                raise InputError(event.error)
    finally:
        engine.close()


def rewritten(raw: bytes, folder: Path) -> None:
    """A packed checkpoint as :func:`decoder`'s, written in another format, a different one for each length."""
    from trirun_cli.workflows.export import TARGETS, export

    checkpoint(raw, folder)
    (folder / "tokenizer.json").write_bytes(dumped(TOKENIZER)[0])
    target = sorted(TARGETS)[len(raw) % len(TARGETS)]
    pre = "gpt-2" if target.startswith("gguf:") else None
    export(folder, folder / f"out-{len(raw)}", to=target, pre=pre)


_BYTE_LEVEL = {
    "tokenizer.ggml.model": (8, "gpt2"), "tokenizer.ggml.pre": (8, "qwen2"),
    "tokenizer.ggml.merges": (9, (8, ["a b"])), "tokenizer.ggml.eos_token_id": (4, 0),
    "tokenizer.ggml.add_bos_token": (7, False), "tokenizer.chat_template": (8, "{{ messages }}"),
}  # fmt: skip
# Rows of 256 for those types whose blocks are so long; of heads of 2 and an MLP of 4, which keeps the file small.
_WIDE = GGUF_METADATA | _BYTE_LEVEL | {
    "general.architecture": (8, "qwen2"), "qwen2.block_count": (4, 3), "qwen2.attention.head_count": (4, 1),
    "qwen2.attention.key_length": (4, 2), "qwen2.attention.value_length": (4, 2),
    "qwen2.embedding_length": (4, 256), "qwen2.feed_forward_length": (4, 4), "qwen2.context_length": (4, 32),
    "qwen2.attention.layer_norm_rms_epsilon": (6, 1e-5), "qwen2.rope.scaling.type": (8, "yarn"),
    "qwen2.rope.scaling.factor": (6, 2.0),
}  # fmt: skip
_MIXTURE = GGUF_METADATA | {
    "general.architecture": (8, "qwen3moe"),
    **{key.replace("llama.", "qwen3moe."): value for key, value in GGUF_METADATA.items() if key.startswith("llama.")},
    "qwen3moe.expert_count": (4, 2), "qwen3moe.expert_used_count": (4, 1),
    "qwen3moe.expert_feed_forward_length": (4, 64),
}  # fmt: skip


def _wide() -> Tensors:
    tensors: Tensors = {
        "token_embd.weight": (12, (4, 256)), "output.weight": (8, (4, 256)), "output_norm.weight": (0, (256,)),
    }  # fmt: skip
    kinds = iter((34, 35, 36, 41, 134, 135, 142, 143, 2, 14, 12, 30, 0, 1, 8))
    for layer in range(3):
        tensors |= {f"blk.{layer}.{name}.weight": (0, (256,)) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.attn_{name}.bias": (0, (2,)) for name in "qkv"}
        for name, rows in {"attn_q": 2, "attn_k": 2, "attn_v": 2, "ffn_gate": 4, "ffn_up": 4}.items():
            tensors[f"blk.{layer}.{name}.weight"] = (next(kinds), (rows, 256))
        tensors |= {
            f"blk.{layer}.{name}.weight": (1, (256, k)) for name, k in {"attn_output": 2, "ffn_down": 4}.items()
        }
    return tensors


def _experts() -> Tensors:
    own = {
        "attn_norm": (1, (64,)), "ffn_norm": (1, (64,)), "attn_q_norm": (1, (32,)), "attn_k_norm": (1, (32,)),
        "ffn_gate_inp": (0, (2, 64)), "attn_q": (42, (64, 64)), "attn_k": (42, (32, 64)), "attn_v": (42, (32, 64)),
        "attn_output": (42, (64, 64)), **{f"ffn_{name}_exps": (42, (2, 64, 64)) for name in ("gate", "up", "down")},
    }  # fmt: skip
    outer: Tensors = {
        "token_embd.weight": (1, (4, 64)),
        "output_norm.weight": (1, (64,)),
    }
    return outer | {f"blk.0.{name}.weight": tensor for name, tensor in own.items()}


def _split() -> tuple[bytes, bytes]:
    """The first part of a file with all metadata, and the second with all tensors."""
    marks = {"split.count": (2, 2), "split.no": (2, 0)}
    return gguf_bytes(GGUF_METADATA | marks, {}), gguf_bytes(marks | {"split.no": (2, 1)})


GGUF, GGUF_TYPES = [gguf_bytes(), gguf_bytes(_MIXTURE, _experts())], [gguf_bytes(_WIDE, _wide())]
_FIRST, PART = _split()


def gguf(raw: bytes, folder: Path, name: str = "model.gguf") -> None:
    """A GGUF file: every tensor as floats, and the quantized ones as codes."""
    from trirun_cli.checkpoint.formats.gguf.source import GgufModel

    (folder / name).write_bytes(raw)
    model = GgufModel(folder / name.replace("-00002-", "-00001-"))
    for tensor in model:
        model.tensor(tensor)
        if model.is_quantized(tensor):
            model.codes(tensor)


def gguf_part(raw: bytes, folder: Path) -> None:
    """The second of two parts of a GGUF file."""
    (folder / "model-00001-of-00002.gguf").write_bytes(_FIRST)
    gguf(raw, folder, "model-00002-of-00002.gguf")
