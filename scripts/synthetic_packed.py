"""A packed checkpoint of any decoder shape with random ternary weights, for timing a server of that size.

    python scripts/synthetic_packed.py /dev/shm/llama-7b-packed --shape llama-2-7b --tokenizer configs/demo-model

Llama-2-7B's takes 2.1 GB and, on a GPU, seconds. Tokens that the tokenizer does not have get an output row of zeros, so
that greedy answers are text.

    python scripts/synthetic_packed.py /tmp/8b --shape qwen3-8b --family qwen3 --group-size 128 --packed-vocabulary \
        --tokenizer configs/demo-model && trirun export /tmp/8b --to gguf:Q2_0 --pre gpt-2 --out /tmp/8b.gguf

is what Ternary-Bonsai-8B is: embedding and head are ternary too. That head has no rows of zeros.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.weights.names import (
    EMBEDDING,
    EMBEDDING_MODULE,
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


def write(
    directory: Path, shape: DecoderShape, *, family: str, tokens: int, context: int, group_size: int,
    packed_vocabulary: bool, device: str,
) -> None:  # fmt: skip
    """``family``: llama or qwen3. ``tokens``: that the tokenizer has. ``context``: positions of config.json."""
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

    def ternary(name: str, n: int, k: int) -> dict[str, Tensor]:
        packed = random_ternary(n, k, spec, generator)
        return {name + WEIGHT: packed.words, name + SCALE: packed.scales}

    outer = {FINAL_NORM: torch.ones(hidden)}
    if packed_vocabulary:
        for name in (EMBEDDING_MODULE, HEAD_MODULE):
            outer |= ternary(name, shape.vocab, hidden)
    else:
        head = normal() / hidden**0.5
        head[tokens:] = 0
        outer |= {EMBEDDING: normal().half(), HEAD: head.half()}
    save("model-outer.safetensors", outer)
    mixer, ffn = shape.layers[0].mixer, shape.layers[0].feed_forward.size
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    norms |= {"q_norm": mixer.head_dim, "k_norm": mixer.head_dim} if family == "qwen3" else {}
    for layer, each in enumerate(shape.layers):
        prefix = layer_prefix(layer)
        tensors = {prefix + LAYER_NORMS[name]: torch.ones(size) for name, size in norms.items()}
        for name, (n, k) in each.linear_sizes(hidden).items():
            tensors |= ternary(prefix + LAYER_LINEARS[name], n, k)
        save(f"model-{layer:03d}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    padded = {name: [shape.vocab, hidden] for name in (EMBEDDING_MODULE, HEAD_MODULE) if shape.vocab % 64}
    form = Format(group_size=group_size, modules_to_not_convert=[HEAD_MODULE])
    if packed_vocabulary:
        form = Format(group_size=group_size, padded=padded, embeddings=[EMBEDDING_MODULE])
    config = {
        "architectures": [f"{family.title()}ForCausalLM"], "model_type": family, "dtype": "float16",
        "hidden_act": "silu", "vocab_size": shape.vocab, "hidden_size": hidden, "intermediate_size": ffn,
        "head_dim": mixer.head_dim,
        "num_hidden_layers": len(shape.layers), "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "max_position_embeddings": context, "rms_norm_eps": shape.norm_eps, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 0, "eos_token_id": 0,
        "quantization_config": form.to_dict(),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default="llama-2-7b", help="a decoder of configs/shapes.yaml")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model directory whose tokenizer is copied")
    parser.add_argument("--family", default="llama", choices=("llama", "qwen3"))
    parser.add_argument("--packed-vocabulary", action="store_true", help="a ternary embedding and head")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shape = decoder_shape_named(options.shape)
    tokens = len(json.loads((options.tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    write(
        options.directory, shape, family=options.family, tokens=min(tokens, shape.vocab), context=options.context,
        group_size=options.group_size, packed_vocabulary=options.packed_vocabulary, device=options.device,
    )  # fmt: skip
    for file in options.tokenizer.glob("*token*.json"):
        shutil.copy(file, options.directory)


if __name__ == "__main__":
    main()
