"""Which tensor of a Llama-like checkpoint is its output head."""

from __future__ import annotations

from typing import Any

from .weight_memory import StoredTensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def head_name(config: dict[str, Any], stored: StoredTensors) -> str:
    """The name of the output head: the embedding's where no other is stored, and where config.json ties the two and
    they are equal. A head that differs is used whatever config.json says, as transformers does."""
    if HEAD not in stored:
        return EMBEDDING
    tied = bool(config.get("tie_word_embeddings", False)) and EMBEDDING in stored
    return EMBEDDING if tied and stored.equal(EMBEDDING, HEAD) else HEAD
