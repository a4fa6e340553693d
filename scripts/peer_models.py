"""The same random ternary Llama as a trirun checkpoint and as a GGUF file, for side-by-side speed runs.

Weights are {-1, 0, 1} times a real fp16 scale per output row, which tile64 and llama.cpp's TQ2_0 both hold exactly, so
the two files are one model: 1.36 B parameters in the default shape. GGUF needs ``numpy`` and the ``gguf`` package, and
runs in the Python of the peer's environment; see bench_cpu_peers.py for its set-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# Hugging Face's module, GGUF's name, (n, k) by the keys of SHAPE. Key and value have the shape of query: no GQA here.
LINEARS = (
    ("self_attn.q_proj", "attn_q", "hidden_size", "hidden_size"),
    ("self_attn.k_proj", "attn_k", "hidden_size", "hidden_size"),
    ("self_attn.v_proj", "attn_v", "hidden_size", "hidden_size"),
    ("self_attn.o_proj", "attn_output", "hidden_size", "hidden_size"),
    ("mlp.gate_proj", "ffn_gate", "intermediate_size", "hidden_size"),
    ("mlp.up_proj", "ffn_up", "intermediate_size", "hidden_size"),
    ("mlp.down_proj", "ffn_down", "hidden_size", "intermediate_size"),
)
NORMS = (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))


def linears(layers: int) -> Iterator[tuple[int, str, str, int, int]]:
    """(seed, Hugging Face name, GGUF name, n, k) of every ternary matrix."""
    for layer in range(layers):
        for index, (theirs, gguf_name, n, k) in enumerate(LINEARS):
            yield (
                layer * len(LINEARS) + index,
                f"model.layers.{layer}.{theirs}",
                f"blk.{layer}.{gguf_name}.weight",
                SHAPE[n],
                SHAPE[k],
            )


def ternary(seed: int, n: int, k: int):
    """Codes int8 [n, k] in {-1, 0, 1} and fp16 scales [n, 1], the same for the same seed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    codes = np.frombuffer(rng.bytes(n * k), dtype=np.uint8).reshape(n, k) % 3
    # The variance of a uniform ternary value is 2/3; this keeps every linear's output at its input's scale.
    scales = (1.5 / k) ** 0.5 * rng.uniform(0.8, 1.2, (n, 1))
    return codes.astype(np.int8) - 1, scales.astype(np.float16)


def dense(seed: int, rows: int, columns: int):
    """The embedding or the head: normal, fp16 [rows, columns]."""
    import numpy as np

    return np.random.default_rng(10_000 + seed).normal(0, 0.02, (rows, columns)).astype(np.float16)


def write_trirun(out: Path, layers: int) -> None:
    """The checkpoint directory ``out``: config.json and one safetensors file."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig
    from trirun_kernels import QuantSpec, pack

    from trirun_cli.checkpoint.reader import Format

    spec = QuantSpec(-1, 1.0)
    hidden, vocab = SHAPE["hidden_size"], SHAPE["vocab_size"]
    tensors = {
        EMBEDDING: torch.from_numpy(dense(0, vocab, hidden)),
        HEAD: torch.from_numpy(dense(1, vocab, hidden)),
        FINAL_NORM: torch.ones(hidden, dtype=torch.float16),
    }
    for layer in range(layers):
        for norm, _ in NORMS:
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden, dtype=torch.float16)
    for seed, name, _, n, k in linears(layers):
        codes, scales = ternary(seed, n, k)
        packed = pack(torch.from_numpy(codes + 1).to(torch.uint8), torch.from_numpy(scales), spec)
        tensors |= {f"{name}.weight": packed.words, f"{name}.weight_scale": packed.scales}
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shape = SHAPE | {"num_hidden_layers": layers}
    config = LlamaConfig(**shape, tie_word_embeddings=False, dtype="float16", architectures=["LlamaForCausalLM"])
    section = Format(group_size=-1, zero=1.0, modules_to_not_convert=["lm_head"]).to_dict()
    (out / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": section}, indent=1))


def write_gguf(out: Path, layers: int) -> None:
    """TQ2_0 linears, fp16 embedding and head: what llama-quantize then turns into the usual mixture."""
    import gguf
    import numpy as np

    hidden, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_TQ2_0)
    writer.add_tensor("token_embd.weight", dense(0, SHAPE["vocab_size"], hidden))
    writer.add_tensor("output.weight", dense(1, SHAPE["vocab_size"], hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for _, norm in NORMS:
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    kind = gguf.GGMLQuantizationType.TQ2_0
    for seed, _, name, n, k in linears(layers):
        codes, scales = ternary(seed, n, k)
        if "attn_q" in name or "attn_k" in name:
            # GGUF's llama rotates neighbouring pairs, Hugging Face the two halves of a head: reorder the rows.
            order = np.arange(n).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
            codes, scales = codes[order], scales[order]
        writer.add_tensor(name, gguf.quantize(codes * scales.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("trirun", "gguf"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    arguments = parser.parse_args()
    (write_trirun if arguments.kind == "trirun" else write_gguf)(arguments.out, arguments.layers)


def make_all(folder: Path, peer_python: Path, quantize: Path, types: list[str], layers: int) -> tuple[Path, list[Path]]:
    """The trirun checkpoint and one GGUF file per type under ``folder``; what exists is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, base = folder / f"trirun-{layers}", folder / f"base-{layers}.gguf"
    if not checkpoint.exists():
        write_trirun(checkpoint, layers)
    if not base.exists():
        subprocess.run([peer_python, __file__, "gguf", base, "--layers", str(layers)], check=True)
    files = []
    for kind in types:
        file = folder / f"{kind}-{layers}.gguf"
        if not file.exists():
            command = [str(quantize), "--allow-requantize", str(base), str(file), kind]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        files.append(file)
    return checkpoint, files


if __name__ == "__main__":
    main()
