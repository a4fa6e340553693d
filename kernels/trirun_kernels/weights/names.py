"""The names of tensors in a model directory: one table for everything that reads or writes one.

A linear layer ``<module>`` has ``<module>.weight`` and perhaps ``<module>.bias``. Packed, its weight is int32 words
[n/64, k/32, 128], and beside it are ``<module>.weight_scale``, fp16 [k/group_size, n], and, on a grid of real zero
points, ``<module>.weight_zero`` likewise. What stands outside the linear layers has the names of Llama in transformers,
which most families share. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .safetensors_dir import SafetensorsDir

# After a module's name.
WEIGHT, SCALE, ZERO, BIAS = ".weight", ".weight_scale", ".weight_zero", ".bias"

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
HEAD_MODULE = HEAD.removesuffix(WEIGHT)

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
_NORM_OR_BIAS = re.compile(r"model\.layers\.\d+\.(.+(?:norm\.weight|\.bias))")


def layer_prefix(layer: int) -> str:
    """What the names of a decoder layer's tensors begin with, for example ``model.layers.3.``"""
    return f"model.layers.{layer}."


def packed_modules(names: Iterable[str]) -> list[str]:
    """The packed modules among the tensors of these names, sorted: those with a ``.weight_scale``."""
    return sorted(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))


def embedding_names(config: dict[str, Any], tensors: SafetensorsDir) -> tuple[str, str]:
    """Under which names the embedding and the output head of a Llama-like model are to be read.

    A model that ties them stores one tensor for both, by the name of either, or two that are equal. A head that differs
    is used whatever config.json says, as transformers does.

    Args:
        config: config.json. tensors: the model's.

    Raises:
        TensorFileError: two equal tensors cannot be read to the end.
    """
    tied = bool(config.get("tie_word_embeddings", False))
    if HEAD not in tensors:
        return EMBEDDING, EMBEDDING
    if EMBEDDING not in tensors:
        return (HEAD, HEAD) if tied else (EMBEDDING, HEAD)
    return EMBEDDING, EMBEDDING if tied and tensors.equal(EMBEDDING, HEAD) else HEAD


def missing_in_a_layer(names: Collection[str], layers: int) -> str | None:
    """The name of a norm or a bias that some decoder layer has among these names, and another of the first ``layers``
    has not; None where all are alike."""
    found = sorted({matched[1] for name in names if (matched := _NORM_OR_BIAS.fullmatch(name))})
    expected = (layer_prefix(layer) + part for part in found for layer in range(layers))
    return next((name for name in expected if name not in names), None)
