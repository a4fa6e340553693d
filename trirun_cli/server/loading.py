"""From a model directory and its engine to what the server serves."""

from __future__ import annotations

from pathlib import Path

from ..engine.engine import Engine
from ..engine.generation import generation_defaults, stop_ids
from ..errors import InputError
from ..text.detokenizer import load_tokenizer, quick_tokenizer
from .service import Model
from .tokenizer import Vocabulary

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def make_model(path: Path, engine: Engine, chat_template: str | None = None) -> Model:
    """A model directory ready to serve; its engine is started.

    Requests that say nothing about sampling get what generation_config.json says, where it samples at all; otherwise
    OpenAI's defaults, temperature 1 among them.

    Args:
        chat_template: Jinja source that replaces the tokenizer's.

    Raises:
        InputError: the tokenizer is missing or damaged.
    """
    # A template of one's own needs transformers to fill it in.
    tokenizer = quick_tokenizer(path, rich=True) if chat_template is None else load_tokenizer(path)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(f"{path}: the tokenizer has no tokenizer.json, which serving needs")
    vocabulary = Vocabulary(tokenizer, size=engine.vocab_size, context=engine.context, chat_template=chat_template)
    settings = generation_defaults(path)
    sampled = bool(settings.get("do_sample"))
    defaults = {name: settings[name] for name in _DEFAULTS if sampled and settings.get(name) is not None}
    engine.start()
    return Model(engine, vocabulary, frozenset(stop_ids(path)), defaults)
