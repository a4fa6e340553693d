"""Which tensors of a Llama-like checkpoint are its embedding and its output head."""

from __future__ import annotations

from typing import Any

from ..backends.weight_memory import StoredTensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def embedding_names(config: dict[str, Any], stored: StoredTensors) -> tuple[str, str]:
    """Under which names the embedding and the output head are to be read. A model that ties them stores one tensor for
    both, by the name of either, or two that are equal. A head that differs is used whatever config.json says, as
    transformers does."""
    tied = bool(config.get("tie_word_embeddings", False))
    if HEAD not in stored:
        return EMBEDDING, EMBEDDING
    if EMBEDDING not in stored:
        return (HEAD, HEAD) if tied else (EMBEDDING, HEAD)
    return EMBEDDING, EMBEDDING if tied and stored.equal(EMBEDDING, HEAD) else HEAD
