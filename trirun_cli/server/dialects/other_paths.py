"""Paths of OpenAI's and vLLM's servers that this one does not have, and why: a 404 that says so."""

from __future__ import annotations

from collections.abc import Mapping

_POOLING = "models here generate text; none ranks or classifies"
_TEXT = "the server reads and writes text"
_STORED = "the server stores nothing"
_WHOLE = "models are loaded when requests name them, and are otherwise as they are"

OTHER_PATHS: Mapping[str, str] = {
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"), _POOLING),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/realtime"), _TEXT),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), _TEXT),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/conversations", "/v1/vector_stores", "/v1/assistants"), _STORED),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"), _WHOLE),
    "/v1/moderations": "neither prompts nor answers are moderated",
    "/v1/fine_tuning/jobs": "trirun finetune trains models",
    "/inference/v1/generate": "/v1/completions takes token ids and gives them with return_token_ids",
}
