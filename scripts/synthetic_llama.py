"""A Llama of any size with random weights, in shards, for timing what depends on shapes alone.

    python scripts/synthetic_llama.py /dev/shm/llama-7b --tokenizer MODEL            # Llama-2-7B's shape, 13 GB
    python scripts/synthetic_llama.py /dev/shm/llama-cut --tokenizer MODEL --layers 4
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch


def write(directory: Path, layers: int, hidden: int, inner: int, heads: int, vocabulary: int, device: str) -> None:
    """One shard per block, bfloat16, normal weights with standard deviation 0.02 and a few loud input channels, as
    trained models have."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, str] = {}

    def normal(n: int, k: int) -> torch.Tensor:
        values = torch.randn(n, k, generator=generator, device=device).mul_(0.02)
        return values.to("cpu", torch.bfloat16)

    def norm() -> torch.Tensor:
        gain = torch.ones(hidden)
        gain[:: hidden // 16] = 8.0
        return gain.bfloat16()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, {"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    outer = {"model.embed_tokens.weight": normal(vocabulary, hidden), "lm_head.weight": normal(vocabulary, hidden)}
    save("model-outer.safetensors", {**outer, "model.norm.weight": norm()})
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}.{name}_layernorm.weight": norm() for name in ("input", "post_attention")}
        save(f"model-{layer:03d}.safetensors", tensors)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model directory whose tokenizer files are copied along")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shape = (options.layers, options.hidden, options.inner, options.heads, options.vocabulary)
    write(options.directory, *shape, options.device)
    for file in options.tokenizer.glob("tokenizer*") if options.tokenizer else ():
        shutil.copy(file, options.directory)


if __name__ == "__main__":
    main()
