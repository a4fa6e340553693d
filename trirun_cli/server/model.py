"""The model behind the server: its engine, its tokenizer, and what requests get that ask for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.engine import Engine
from ..engine.generation import generation_defaults, stop_ids
from ..errors import InputError
from ..text.detokenizer import load_tokenizer, quick_tokenizer
from .tokenizer import ServerTokenizer

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served.

    Attributes:
        engine: started. tokenizer: of the model.
        stop_ids: token ids that end a text, unless the request says ``ignore_eos``.
        defaults: temperature, top_p, top_k, min_p and repetition_penalty of requests that do not set them.
    """

    engine: Engine
    tokenizer: ServerTokenizer
    stop_ids: frozenset[int]
    defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, path: Path, engine: Engine, chat_template: str | None = None) -> ServedModel:
        """Read what the server needs from a model directory and start the engine.

        Where generation_config.json has ``do_sample``, its sampling parameters become the defaults; otherwise OpenAI's
        apply, temperature 1 among them.

        Args:
            path: the model directory. engine: loaded from it, not started yet.
            chat_template: Jinja source that replaces the tokenizer's.

        Raises:
            InputError: the tokenizer is missing or damaged.
        """
        # Only transformers can render a chat template that is not the tokenizer's own.
        tokenizer = quick_tokenizer(path, rich=True) if chat_template is None else load_tokenizer(path)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise InputError(f"{path}: the tokenizer has no tokenizer.json, which serving needs")
        own = ServerTokenizer(tokenizer, size=engine.vocab_size, context=engine.context, chat_template=chat_template)
        settings = generation_defaults(path)
        sampled = bool(settings.get("do_sample"))
        defaults = {name: settings[name] for name in _DEFAULTS if sampled and settings.get(name) is not None}
        engine.start()
        return cls(engine, own, frozenset(stop_ids(path)), defaults)
