"""Small models in foreign formats, made of bytes that other programs wrote: the rows of one matrix, again and again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.formats.gguf_writer import fp16, fp32, write_gguf

VOCABULARY = 16
TOKENS = [*"abcdefghijkl", "ab", "<s>", "</s>", "Ġ"]
_LINEARS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}  # fmt: skip


def config(hidden: int) -> dict:
    """A Qwen3 of one layer whose linear layers are all [hidden, hidden], with heads of 128."""
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": hidden // 128, "head_dim": 128}
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    made = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 64}
    return made | heads | sizes | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float16"}


def greedy(hidden: int, weight: Tensor, prompt: list[int], tokens: int) -> list[int]:
    """What transformers generates in float32 with this weight float32 [hidden, hidden] in every layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = config(hidden)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**made), dtype=torch.float32).eval()
    state = {f"model.layers.0.{name}.weight": weight for name in _LINEARS.values()}
    model.load_state_dict(state | {"model.embed_tokens.weight": _embedding(hidden).float()}, strict=False)
    model.tie_weights()
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def gguf_model(path: Path, kind: int, rows: np.ndarray, tail: bytes = b"") -> Path:
    """Such a model in GGUF, hidden size 512, of eight stored rows."""
    hidden = 512
    raw = np.tile(rows.reshape(8, -1), (hidden // 8, 1)).tobytes() + tail
    tensors = {"token_embd.weight": fp16(_embedding(hidden).numpy()), "output_norm.weight": fp32(np.ones(hidden))}
    tensors |= {f"blk.0.{name}.weight": fp32(np.ones(128 if "_q_" in name or "_k_" in name else hidden))
                for name in _NORMS}  # fmt: skip
    tensors |= {f"blk.0.{name}.weight": (kind, (hidden, hidden), raw) for name in _LINEARS}
    own = {"block_count": 1, "embedding_length": hidden, "feed_forward_length": hidden, "context_length": 64,
           "attention.head_count": 4, "attention.key_length": 128,
           "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    metadata = {"general.architecture": "qwen3"} | {f"qwen3.{key}": value for key, value in own.items()}
    metadata |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array([1] * 13 + [3, 3, 1]), "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 13, "tokenizer.ggml.eos_token_id": 14,
    }  # fmt: skip
    return write_gguf(path, metadata, tensors)


def directory_model(path: Path, module: dict[str, Tensor], section: dict) -> Path:
    """Such a model as a directory, hidden size 256, every linear layer of these tensors; ``section``: of its config."""
    hidden = 256
    path.mkdir()
    tensors = {"model.embed_tokens.weight": _embedding(hidden), "model.norm.weight": torch.ones(hidden).half()}
    for name in _NORMS.values():
        tensors[f"model.layers.0.{name}.weight"] = torch.ones(128 if "self_attn" in name else hidden).half()
    for name in _LINEARS.values():
        tensors |= {f"model.layers.0.{name}.{part}": tensor.clone() for part, tensor in module.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config(hidden) | section))
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def _embedding(hidden: int) -> Tensor:
    return torch.randn(VOCABULARY, hidden, generator=torch.Generator().manual_seed(0)).half()
