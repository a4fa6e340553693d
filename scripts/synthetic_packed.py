"""A packed checkpoint of any decoder shape with random ternary weights, for timing a server of that size.

    python scripts/synthetic_packed.py /dev/shm/llama-7b-packed --shape llama-2-7b --tokenizer configs/demo-model

Llama-2-7B's takes 2.1 GB and, on a GPU, seconds. Tokens that the tokenizer does not have get an output row of zeros, so
that greedy answers are text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.weights import DecoderShape
from trirun_kernels.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_MODULE,
    LAYER_LINEARS,
    LAYER_NORMS,
    SCALE,
    WEIGHT,
    layer_prefix,
)
from trirun_kernels.weights.safetensors_dir import INDEX

from trirun_cli.bench.models import decoder_shape_named
from trirun_cli.checkpoint.reader import Format
from trirun_cli.models.synthetic import random_ternary


def write(directory: Path, shape: DecoderShape, *, tokens: int, context: int, group_size: int, device: str) -> None:
    """``tokens``: that the tokenizer has. ``context``: positions that config.json promises."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    spec = QuantSpec(group_size, 1.0)
    hidden = shape.hidden
    files: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, directory / name)
        files.update(dict.fromkeys(tensors, name))

    def normal() -> Tensor:
        return torch.randn(shape.vocab, hidden, generator=generator, device=device)

    head = normal() / hidden**0.5
    head[tokens:] = 0
    outer = {EMBEDDING: normal().half(), HEAD: head.half(), FINAL_NORM: torch.ones(hidden)}
    save("model-outer.safetensors", outer)
    for layer in range(shape.layers):
        prefix = layer_prefix(layer)
        tensors = {prefix + LAYER_NORMS[name]: torch.ones(hidden) for name in ("attention_norm", "mlp_norm")}
        for name, (n, k) in shape.linear_sizes.items():
            packed = random_ternary(n, k, spec, generator)
            tensors[prefix + LAYER_LINEARS[name] + WEIGHT] = packed.words
            tensors[prefix + LAYER_LINEARS[name] + SCALE] = packed.scales
        save(f"model-{layer:03d}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", "hidden_act": "silu",
        "vocab_size": shape.vocab, "hidden_size": hidden, "intermediate_size": shape.ffn, "head_dim": shape.head_dim,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": context, "rms_norm_eps": shape.norm_eps, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 0, "eos_token_id": 0,
        "quantization_config": Format(group_size=group_size, modules_to_not_convert=[HEAD_MODULE]).to_dict(),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="llama-2-7b", help="a decoder of configs/shapes.yaml")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model directory whose tokenizer is copied")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shape = decoder_shape_named(options.shape)
    tokens = len(json.loads((options.tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    write(
        options.directory, shape, tokens=min(tokens, shape.vocab), context=options.context,
        group_size=options.group_size, device=options.device,
    )  # fmt: skip
    for file in options.tokenizer.glob("*token*.json"):
        shutil.copy(file, options.directory)


if __name__ == "__main__":
    main()
