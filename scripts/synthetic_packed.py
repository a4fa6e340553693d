"""A packed checkpoint of any decoder shape with random ternary weights, for timing what runs a model of that size.

    python scripts/synthetic_packed.py /dev/shm/llama-7b-packed --shape llama-2-7b --tokenizer configs/demo-model

Llama-2-7B's takes 2.1 GB and, on a GPU, seconds. Tokens that the tokenizer does not have get an output row of zeros, so
that greedy answers are text.

    python scripts/synthetic_packed.py /tmp/8b --shape qwen3-8b --group-size 128 --packed-vocabulary \
        --tokenizer configs/demo-model && trirun export /tmp/8b --to gguf:Q2_0 --pre gpt-2 --out /tmp/8b.gguf

is what Ternary-Bonsai-8B is: embedding and head are ternary too. That head has no rows of zeros.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.shape import Attention, GatedDelta, LayerShape
from trirun_kernels.decoder.weights import vector_lengths
from trirun_kernels.weights.names import (
    BIAS,
    EMBEDDING,
    EMBEDDING_MODULE,
    FINAL_NORM,
    HEAD,
    HEAD_MODULE,
    PREFIX,
    SCALE,
    WEIGHT,
    layer_prefix,
)
from trirun_kernels.weights.safetensors_dir import INDEX

from trirun_cli.bench.shapes import load_decoder_sizes
from trirun_cli.checkpoint.reader import Format
from trirun_cli.models.description import Description, description
from trirun_cli.models.linears import described_layers
from trirun_cli.models.parts import NO_NORMS
from trirun_cli.models.synthetic import random_ternary

# Linears that have biases in some families, or where config.json says so.
_QKV = ("q_proj", "k_proj", "v_proj")
BIASES = {"qwen2": _QKV, "qwen2_moe": _QKV, "starcoder2": (*_QKV, "o_proj", "c_fc", "c_proj"),
          "gpt_oss": (*_QKV, "o_proj", "gate", "up", "down")}  # fmt: skip


class Writer:
    """Random tensors of one model, a file for every layer.

    Attributes:
        files: names of tensors to those of files.
    """

    def __init__(self, directory: Path, group_size: int, device: str) -> None:
        self._directory, self._device = directory, device
        self._spec = QuantSpec(group_size, 1.0)
        self._generator = torch.Generator(device).manual_seed(0)
        self.files: dict[str, str] = {}

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        """One file."""
        from safetensors.torch import save_file

        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, self._directory / name)
        self.files.update(dict.fromkeys(tensors, name))

    def normal(self, *size: int) -> Tensor:
        """Of deviation 1."""
        return torch.randn(*size, generator=self._generator, device=self._device)

    def norm(self, size: int, offset: float, factor: float = 1.0) -> Tensor:
        """Weights of a norm that multiply by about ``factor``, less what is added to them."""
        return factor * (1 + 0.1 * self.normal(size)) - offset

    def ternary(self, module: str, n: int, k: int) -> dict[str, Tensor]:
        """A packed matrix whose outputs are about as large as its inputs."""
        packed = random_ternary(n, k, self._spec, self._generator)
        return {module + WEIGHT: packed.words, module + SCALE: packed.scales}

    def delta(self, mixer: GatedDelta, hidden: int, gates: dict[str, int]) -> dict[str, Tensor]:
        """What a layer of Gated DeltaNet has beside its linears; its states forget within a few to some hundred
        tokens."""
        conv = self.normal(mixer.channels, 1, mixer.taps) * mixer.taps**-0.5
        found = {
            "linear_attn.conv1d.weight": conv, "linear_attn.A_log": self.normal(mixer.value_heads) - 3,
            "linear_attn.dt_bias": self.normal(mixer.value_heads),
            "linear_attn.norm.weight": self.norm(mixer.value_dim, 0),
        }  # fmt: skip
        return found | {f"{name}{WEIGHT}": (self.normal(n, hidden) * hidden**-0.5).half() for name, n in gates.items()}


def write(
    directory: Path, config: dict[str, Any], *, group_size: int = -1, tokens: int | None = None,
    packed_vocabulary: bool = False, device: str = "cpu",
) -> None:  # fmt: skip
    """Write a checkpoint with random weights.

    Args:
        config: a config.json of a family that the native decoder runs. group_size: of the ternary matrices.
        tokens: that the tokenizer has; None: as many as the vocabulary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found, writer = description(config), Writer(directory, group_size, device)
    shape, hidden, tied = found.shape, found.shape.hidden, bool(config.get("tie_word_embeddings"))
    outer = {FINAL_NORM: writer.norm(hidden, found.names.norm_offset)}
    if found.names.vectors.get("mlp_norm", "") is None:
        outer = {}
    if "attention_norm_bias" in found.names.vectors:
        outer[f"{PREFIX}norm{BIAS}"] = 0.1 * writer.normal(hidden)
    if packed_vocabulary:
        for name in (EMBEDDING_MODULE, HEAD_MODULE)[: 2 - tied]:
            outer |= writer.ternary(name, shape.vocab, hidden)
    else:
        rows = writer.normal(shape.vocab, hidden) / hidden**0.5
        if tokens is not None:
            rows[tokens:] = 0
        # A head makes logits near one; what is embedded is near one too, but where the head is the embedding.
        outer |= {EMBEDDING if tied else HEAD: rows.half()}
        if not tied:
            outer[EMBEDDING] = (writer.normal(shape.vocab, hidden) / shape.embedding_scale).half()
    kept = [HEAD_MODULE]
    if (inputs := shape.inputs) is not None:
        table, projection, norm = (PREFIX + found.names.inputs[each] for each in ("table", "projection", "norm"))
        width = len(shape.layers) * inputs.size
        outer[table + WEIGHT] = (writer.normal(inputs.vocab, width) / inputs.table_scale).half()
        outer[projection + WEIGHT] = writer.normal(width, hidden).half()
        outer[norm] = writer.norm(inputs.size, found.names.norm_offset)
        kept.append(projection)
    writer.save("model-outer.safetensors", outer)
    linears = described_layers(found)
    for index, layer in enumerate(shape.layers):
        prefix = layer_prefix(index)
        own = {name.removeprefix(prefix): size for name, size in linears.items() if name.startswith(prefix)}
        tensors = _layer(writer, found, layer, own, config)
        writer.save(f"model-{index:03d}.safetensors", {prefix + name: tensor for name, tensor in tensors.items()})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": writer.files}), encoding="utf-8")
    padded = {name: [shape.vocab, hidden] for name in (EMBEDDING_MODULE, HEAD_MODULE)[: 2 - tied] if shape.vocab % 64}
    form = Format(group_size=group_size, modules_to_not_convert=kept)
    if packed_vocabulary:
        form = Format(
            group_size=group_size, padded=padded, embeddings=[EMBEDDING_MODULE], modules_to_not_convert=kept[1:]
        )
    whole = {"dtype": "float16", "bos_token_id": 0, "eos_token_id": 0} | config
    (directory / "config.json").write_text(
        json.dumps(whole | {"quantization_config": form.to_dict()}, indent=2), encoding="utf-8"
    )


def _layer(
    writer: Writer, found: Description, layer: LayerShape, linears: dict[str, tuple[int, int]], config: dict[str, Any]
) -> dict[str, Tensor]:
    """A layer's tensors by their names within it."""
    names, hidden, tensors = found.names.of(layer), found.shape.hidden, dict[str, Tensor]()
    stated = config.get("attention_bias") or config.get("use_qkv_bias")
    biased = BIASES.get(config["model_type"], _QKV if stated else ())
    for module, (n, k) in linears.items():
        if module in names.gates or module in (names.mixture.shared_gate, names.mixture.router.removesuffix(WEIGHT)):
            continue
        tensors |= writer.ternary(module, n, k)
        if module.rpartition(".")[2] in biased:
            tensors[module + BIAS] = (0.1 * writer.normal(n)).half()
    lengths = vector_lengths(layer, hidden)
    for field, tensor in names.vectors.items():
        if tensor is not None and tensor not in tensors:
            bias, offset = field.endswith("_bias"), 0.0 if field in NO_NORMS else names.norm_offset
            # Scores are as large as a scale of one by the root of a head's size makes them.
            mixer, factor = layer.mixer, 1.0
            if isinstance(mixer, Attention) and field in ("q_norm", "k_norm"):
                factor = (mixer.scale * mixer.head_dim**0.5) ** -0.5
            tensors[tensor] = 0.1 * writer.normal(hidden) if bias else writer.norm(lengths[field], offset, factor)
    if isinstance(layer.mixer, GatedDelta):
        tensors |= writer.delta(layer.mixer, hidden, dict(names.gates))
    if layer.mixture is not None:
        # Float32: where choices are close, two programs make the same.
        mixture, experts = names.mixture, layer.mixture.routing.experts
        tensors[mixture.router] = writer.normal(experts, hidden) * (1 if mixture.router_scale else hidden**-0.5)
        for name, size in ((mixture.router_scale, hidden), (mixture.expert_scale, experts)):
            if name is not None:
                tensors[name] = writer.norm(size, 0.0)
        if names.mixture.shared_gate:
            tensors[names.mixture.shared_gate + WEIGHT] = writer.normal(1, hidden) * hidden**-0.5
        for name in filter(None, (mixture.bias, mixture.correction)):
            tensors[name] = 0.1 * writer.normal(experts)
    return tensors


def config_named(name: str, context: int) -> dict[str, Any]:
    """The config.json of a decoder of configs/shapes.yaml."""
    sizes = load_decoder_sizes()[name]
    if "model_type" not in sizes:
        family = "qwen3" if name.startswith("qwen3") else "llama"
        named = {
            "num_hidden_layers": "layers", "hidden_size": "hidden", "intermediate_size": "ffn",
            "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
            "vocab_size": "vocab",
        }  # fmt: skip
        sizes = {key: sizes[short] for key, short in named.items()} | {
            "model_type": family, "architectures": [f"{family.title()}ForCausalLM"], "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False,
        }  # fmt: skip
    return sizes | {"max_position_embeddings": context}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--shape", default="llama-2-7b", choices=load_decoder_sizes(), help="a decoder of configs/shapes.yaml"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model directory whose tokenizer is copied")
    parser.add_argument("--packed-vocabulary", action="store_true", help="a ternary embedding and head")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokens = len(json.loads((options.tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    write(
        options.directory, config_named(options.shape, options.context), group_size=options.group_size, tokens=tokens,
        packed_vocabulary=options.packed_vocabulary, device=options.device,
    )  # fmt: skip
    for file in options.tokenizer.glob("*token*.json"):
        shutil.copy(file, options.directory)


if __name__ == "__main__":
    main()
