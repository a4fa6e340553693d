"""A Llama of any size with random weights, in shards, for timing what depends on shapes alone.

python scripts/synthetic_llama.py /dev/shm/llama-7b --tokenizer MODEL            # Llama-2-7B's shape, 13 GB
python scripts/synthetic_llama.py /dev/shm/llama-cut --tokenizer MODEL --layers 4
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shutil
from pathlib import Path

import torch
from trirun_kernels.weights.names import EMBEDDING, FINAL_NORM, HEAD

WRITERS = 8  # shards made and written at a time


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
    outer = {name: (vocabulary, hidden) for name in (EMBEDDING, HEAD)}
    block = {f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    block |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
    block |= {"mlp.down_proj.weight": (hidden, inner)}
    block |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shards = {"model-outer.safetensors": outer | {FINAL_NORM: (hidden,)}}
    for layer in range(layers):
        shapes = {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
        shards[f"model-{layer:03d}.safetensors"] = shapes

    def save(seed: int, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def tensor(shape: tuple[int, ...]) -> torch.Tensor:
            if len(shape) == 1:
                gain = torch.ones(shape, dtype=torch.bfloat16)
                gain[:: hidden // 16] = 8.0
                return gain
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()

        save_file({key: tensor(shape) for key, shape in shapes.items()}, directory / name, {"format": "pt"})

    # Shards have generators of their own, so that what they hold does not depend on who is first.
    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(save, range(len(shards)), shards, shards.values()))
    size = sum((directory / name).stat().st_size for name in shards)
    files = {key: name for name, shapes in shards.items() for key in shapes}
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
