"""The names of tensors in a model directory: one table for everything that reads or writes one.

A linear layer ``<module>`` has ``<module>.weight`` and perhaps ``<module>.bias``. Packed, its weight is int32 words
[n/64, k/32, 128], and beside it are ``<module>.weight_scale``, fp16 [k/group_size, n], and, on a grid of real zero
points, ``<module>.weight_zero`` likewise. What stands outside the linear layers has the names of Llama in transformers,
which most families share. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .safetensors_dir import SafetensorsDir

# After a module's name.
WEIGHT, SCALE, ZERO, BIAS = ".weight", ".weight_scale", ".weight_zero", ".bias"

PREFIX = "model."  # of all but the head's
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EMBEDDING_MODULE, HEAD_MODULE = EMBEDDING.removesuffix(WEIGHT), HEAD.removesuffix(WEIGHT)

# Within a decoder layer, by the fields of trirun_kernels.decoder.weights.LayerWeights.
LAYER_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LAYER_NORMS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attention_sub_norm": "self_attn.attn_sub_norm.weight",
    "mlp_sub_norm": "mlp.ffn_sub_norm.weight",
}
_NORM_OR_BIAS = re.compile(r"layers\.(\d+)\.(.+(?:norm\.weight|\.bias))")


def layer_prefix(layer: int, prefix: str = PREFIX) -> str:
    """What the names of a decoder layer's tensors begin with, for example ``model.layers.3.``; ``prefix``: what the
    decoder's do."""
    return f"{prefix}layers.{layer}."


def packed_modules(names: Iterable[str]) -> list[str]:
    """The packed modules among the tensors of these names, sorted: those with a ``.weight_scale``."""
    return sorted(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))


def embedding_names(config: dict[str, Any], tensors: SafetensorsDir, prefix: str = PREFIX) -> tuple[str, str]:
    """Under which names the embedding and the output head of a Llama-like model are to be read.

    A model that ties them stores one tensor for both, by the name of either, or two that are equal. A head that differs
    is used whatever config.json says, as transformers does.

    Args:
        config: config.json. tensors: the model's. prefix: what the names of the decoder's tensors begin with.

    Raises:
        TensorFileError: two equal tensors cannot be read to the end.
    """
    tied = bool(config.get("tie_word_embeddings", False))
    embedding = prefix + "embed_tokens.weight"
    head = next((name for name in (HEAD, prefix.removesuffix(PREFIX) + HEAD) if name in tensors), None)
    if head is None:
        return embedding, embedding
    if embedding not in tensors:
        return (head, head) if tied else (embedding, head)
    alike = tied and _equal(tensors, embedding.removesuffix(WEIGHT), head.removesuffix(WEIGHT))
    return embedding, embedding if alike else head


def _equal(tensors: SafetensorsDir, module: str, other: str) -> bool:
    """Whether the weights of two modules are one, packed or not."""
    parts = [part for part in (WEIGHT, SCALE, ZERO) if module + part in tensors or other + part in tensors]
    return all(
        module + part in tensors and other + part in tensors and tensors.equal(module + part, other + part)
        for part in parts
    )


def missing_in_a_layer(names: Collection[str], kinds: Sequence[Any], prefix: str = PREFIX) -> str | None:
    """The name of a norm or a bias that some decoder layer has among these names, and another of its kind has not; None
    where all are alike. ``kinds``: of every layer."""
    within = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    found = [(int(matched[1]), matched[2]) for name in within if (matched := _NORM_OR_BIAS.fullmatch(name))]
    parts = sorted({(part, kinds[layer]) for layer, part in found if layer < len(kinds)}, key=lambda each: each[0])
    expected = (
        layer_prefix(layer, prefix) + part for part, kind in parts for layer, own in enumerate(kinds) if own == kind
    )
    return next((name for name in expected if name not in names), None)
