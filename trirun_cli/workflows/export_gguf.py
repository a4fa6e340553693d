"""A packed checkpoint as one GGUF file: which tensors go where, and what the file says of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trirun_kernels.decoder.shape import Attention, DecoderShape
from trirun_kernels.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_LINEARS,
    LAYER_NORMS,
    SCALE,
    WEIGHT,
    ZERO,
    embedding_names,
)

from ..checkpoint.formats.gguf.architecture import FAMILIES, LINEARS, MIXTRAL_FAMILY, NORMS
from ..checkpoint.formats.gguf.mixtures import EXPERT_LAYERS, ROUTER
from ..checkpoint.formats.gguf.tokenizer_metadata import tokenizer_metadata
from ..checkpoint.formats.gguf.types import ALIGNMENT, GgufType
from ..checkpoint.formats.gguf.writer import DENSE, F32, FILE_TYPES, PACKED, GgufTensor, encode
from ..checkpoint.formats.words import exactly, unpacked
from ..checkpoint.reader import Checkpoint
from ..errors import InputError
from ..models.description import UnsupportedModel, decoder_shape, longest_context
from ..models.rotary import llama3_frequencies, rotary_parameters

# Model type to llama.cpp's architecture. "llama" turns neighbouring elements of a head, the others its two halves.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "olmoe": "olmoe",
}  # fmt: skip
_PERMUTED = [family for family, architecture in ARCHITECTURES.items() if architecture == "llama"]
_MIXTURES = {
    family.model_type: family.mixture for family in (*FAMILIES.values(), MIXTRAL_FAMILY) if family.mixture is not None
}
# An expert's matrix: layer, expert, and which of its three.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)\.weight")
_ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")


def gguf_name(name: str) -> str | None:
    """llama.cpp's name of a tensor of a Llama-like model; None where it has none."""
    if name == FINAL_NORM:
        return "output_norm.weight"
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4 or not parts[2].isdecimal():
        return None
    if name.endswith(_ROUTERS):
        return f"blk.{parts[2]}.{ROUTER}{WEIGHT}"
    module, _, end = parts[3].rpartition(".")
    linears = {stored: LINEARS[field] for field, stored in LAYER_LINEARS.items()}
    norms = {stored.removesuffix(WEIGHT): NORMS[field] for field, stored in LAYER_NORMS.items()}
    known = (linears | norms).get(module)
    return f"blk.{parts[2]}.{known}.{end}" if known and end in ("weight", "bias") else None


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · d, ...] of a query or key projection, from halves of a head turned together to neighbours:
    row ``h d + i`` and ``h d + d/2 + i`` become ``h d + 2 i`` and ``h d + 2 i + 1``."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gguf_metadata(checkpoint: Checkpoint, kind: GgufType, pre: str | None) -> dict[str, Any]:
    """What the file says of the model and its tokenizer.

    Raises:
        InputError: llama.cpp has no such model, or no such tokenizer.
    """
    config = checkpoint.config
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        reason = "computes SiLU where the model has ReLU²" if family == "bitnet" else "is not written by trirun"
        raise InputError(f"{checkpoint.path}: llama.cpp's model for {family!r} {reason}")
    try:
        shape = decoder_shape(config)
    except UnsupportedModel as error:
        raise InputError(f"{checkpoint.path}: {error}") from None
    arch, rotary = ARCHITECTURES[family], rotary_parameters(config)
    layer = shape.layers[0]
    mixer, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    if feed_forward.activation != "silu":
        raise InputError(f"{checkpoint.path}: llama.cpp's {arch} computes SiLU, the model {feed_forward.activation}")
    _check_rows(checkpoint, shape.vocab)
    # Its model has no sliding window; within one, attention is plain.
    longest = min(longest_context(config), *(window or 2**40 for window in shape.windows))
    numbers: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "context_length": longest,
        "embedding_length": shape.hidden,
        "block_count": len(shape.layers),
        # A mixture has none of its own; config.json still has its size, or that of an expert.
        "feed_forward_length": feed_forward.size or int(config["intermediate_size"]),
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.dimension_count": mixer.head_dim,
        "rope.freq_base": float(rotary["rope_theta"]),
    }
    if rotary["rope_type"] in ("linear", "yarn"):
        numbers |= {"rope.scaling.type": rotary["rope_type"], "rope.scaling.factor": float(rotary["factor"])}
        original = rotary.get("original_max_position_embeddings")
        if rotary["rope_type"] == "yarn" and original:
            numbers["rope.scaling.original_context_length"] = int(original)
    numbers |= _mixture_numbers(checkpoint, shape)
    head: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": checkpoint.path.resolve().name,
    }
    head |= {"general.file_type": FILE_TYPES[kind.name], "general.quantization_version": 2}
    head |= {"general.alignment": ALIGNMENT}
    return (
        head
        | {f"{arch}.{key}": value for key, value in numbers.items()}
        | tokenizer_metadata(checkpoint.path, config, pre)
    )


def _check_rows(checkpoint: Checkpoint, vocab: int) -> None:
    """That the embedding has as many rows as config.json says: every row gets a token in the file."""
    name, _ = embedding_names(checkpoint.config, checkpoint)
    module = name.removesuffix(WEIGHT)
    shape = checkpoint.shape(module) if module in checkpoint.modules else checkpoint[name].shape
    if shape[:1] != (vocab,):
        raise InputError(f"{checkpoint.path}: {name} has shape {list(shape)}, config.json says {vocab} rows")


def _mixture_numbers(checkpoint: Checkpoint, shape: DecoderShape) -> dict[str, Any]:
    """What the file says of a mixture of experts; nothing of another model.

    Raises:
        InputError: a layer has no experts, or they are chosen otherwise than llama.cpp's model of the family does.
    """
    family = checkpoint.config["model_type"]
    known = _MIXTURES.get(family)
    if known is None:
        return {}
    mixtures = [layer.mixture for layer in shape.layers]
    first = mixtures[0]
    if first is None or any(mixture != first for mixture in mixtures):
        raise InputError(f"{checkpoint.path}: llama.cpp's {family} has the same experts in every layer")
    if first.routing.normalize != known.normalized:
        scaled = "scales" if known.normalized else "does not scale"
        raise InputError(f"{checkpoint.path}: llama.cpp's {family} {scaled} the chosen experts' weights to a sum of 1")
    if checkpoint.config.get("clip_qkv") is not None:
        raise InputError(f"{checkpoint.path}: it clamps queries, keys and values (clip_qkv), which is not written")
    return {
        "expert_count": first.routing.experts,
        "expert_used_count": first.routing.top_k,
        "expert_feed_forward_length": first.size,
    }


def gguf_tensors(
    checkpoint: Checkpoint, kind: GgufType, starting: Callable[[str], None], done: Callable[[str, GgufType], None]
) -> Iterator[GgufTensor]:
    """The tensors of the file. A matrix whose rows are no whole blocks, and whatever the checkpoint holds unpacked, is
    stored as floats that hold every value.

    Args:
        checkpoint: the model. kind: of the packed layers; F16 unpacks them.
        starting: called with the name of each packed module before its data is made. done: with name and type after.

    Raises:
        InputError: a tensor has no name in llama.cpp.
    """
    config = checkpoint.config
    mixer = decoder_shape(config).layers[0].mixer
    assert isinstance(mixer, Attention)
    heads = {"attn_q": mixer.heads, "attn_k": mixer.kv_heads} if config["model_type"] in _PERMUTED else {}
    modules = set(checkpoint.modules)
    embedding, head = embedding_names(config, checkpoint)
    # Without an output of its own, llama.cpp takes the embedding.
    for name, target in {head: "output.weight", embedding: "token_embd.weight"}.items():
        if (module := name.removesuffix(WEIGHT)) in modules:
            yield _packed(checkpoint, module, target, kind, None, starting, done)
        else:
            yield _plain(checkpoint, name, target, None)
    experts: dict[tuple[int, str], dict[int, str]] = {}
    for name in checkpoint.names:
        module = name.removesuffix(WEIGHT)
        if name in (EMBEDDING, HEAD) or name.endswith((SCALE, ZERO, ".rotary_emb.inv_freq")):
            continue
        if matched := _EXPERT.fullmatch(name):
            experts.setdefault((int(matched[1]), matched[3]), {})[int(matched[2])] = module
            continue
        known = gguf_name(name)
        if known is None:
            raise InputError(f"{checkpoint.path}: {name} has no name in llama.cpp")
        turned = next((count for part, count in heads.items() if f".{part}." in known), None)
        if module in modules and name.endswith(WEIGHT):
            yield _packed(checkpoint, module, known, kind, turned, starting, done)
        else:
            yield _plain(checkpoint, name, known, turned)
    for (layer, part), members in experts.items():
        missing = next((number for number in range(len(members)) if members.get(number) not in modules), None)
        if missing is not None:
            raise InputError(f"{checkpoint.path}: expert {missing} of layer {layer} has no packed {part}")
        matrices = [
            _packed(checkpoint, members[number], "", kind, None, starting, done) for number in range(len(members))
        ]
        yield _stacked(f"blk.{layer}.{EXPERT_LAYERS[part]}{WEIGHT}", matrices)
    if rotary_parameters(config)["rope_type"] == "llama3":
        factors = _llama3_factors(rotary_parameters(config), mixer.head_dim)
        yield GgufTensor("rope_freqs.weight", tuple(factors.shape), F32, lambda: factors)


def _check_heads(checkpoint: Checkpoint, name: str, rows: int, heads: int | None) -> None:
    """That the rows of a tensor are those of whole heads, which have two halves each."""
    if heads is not None and rows % (2 * heads):
        raise InputError(f"{checkpoint.path}: {name} has {rows} rows, config.json says {heads} heads")


def _packed(
    checkpoint: Checkpoint,
    module: str,
    known: str,
    kind: GgufType,
    heads: int | None,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> GgufTensor:
    n, k = checkpoint.shape(module)
    _check_heads(checkpoint, module + WEIGHT, n, heads)
    stored = kind if kind.name in PACKED and k % kind.block == 0 else DENSE[torch.float16]

    def data() -> Tensor:
        starting(module)
        weight = unpacked(checkpoint.packed(module))
        if stored.name in PACKED:
            rows = encode(weight, stored, module)
        else:
            rows = exactly(weight.dequantize(), (torch.float16,), module)
        done(module, stored)
        return rows if heads is None else interleaved(rows, heads)

    return GgufTensor(known, (n, k), stored, data)


def _stacked(known: str, experts: list[GgufTensor]) -> GgufTensor:
    """The same matrix [n, k] of all experts of a layer as one tensor [experts, n, k]."""
    first = experts[0]
    return GgufTensor(
        known, (len(experts), *first.shape), first.kind, lambda: torch.stack([expert.data() for expert in experts])
    )


def _plain(checkpoint: Checkpoint, name: str, known: str, heads: int | None) -> GgufTensor:
    tensor = checkpoint.tensor(name)
    # llama.cpp adds and multiplies vectors in float32 alone.
    dtype = torch.float32 if tensor.dim() == 1 else tensor.dtype
    if not tensor.dim():
        raise InputError(f"{checkpoint.path}: {name} is a number without a dimension, which llama.cpp has none of")
    _check_heads(checkpoint, name, len(tensor), heads)
    if dtype not in DENSE:
        raise InputError(f"{checkpoint.path}: {name} is {tensor.dtype}")

    def data() -> Tensor:
        rows = checkpoint.tensor(name).to(dtype)
        return rows if heads is None else interleaved(rows, heads)

    return GgufTensor(known, tuple(tensor.shape), DENSE[dtype], data)


def _llama3_factors(rotary: dict[str, Any], head_dim: int) -> Tensor:
    """By how much each frequency of a head is divided (Llama 3.1), float32 [head_dim / 2]."""
    frequencies = rotary["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    return torch.from_numpy((frequencies / llama3_frequencies(frequencies, rotary)).astype(np.float32))
