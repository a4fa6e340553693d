"""The model behind the server: its engine, its tokenizer, and what requests get that ask for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import read_json
from ..engine.engine import Engine
from ..engine.generation import generation_defaults, stop_ids
from ..engine.request import Pooling
from ..errors import InputError
from ..text.chat_template import check_chat_template
from ..text.detokenizer import quick_tokenizer
from ..text.grammar import GrammarCompiler
from ..text.tokenizer import template_file
from .tokenizer import ServerTokenizer

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served.

    Attributes:
        engine: started. tokenizer: of the model.
        stop_ids: token ids that end a text, unless the request says ``ignore_eos``.
        defaults: temperature, top_p, top_k, min_p and repetition_penalty of requests that do not set them.
        why_slots: why so many requests run at once, for people.
        pooling: of embeddings, where a request does not say it. grammars: compiles those of structured output.
    """

    engine: Engine
    tokenizer: ServerTokenizer
    stop_ids: frozenset[int]
    defaults: Mapping[str, float] = field(default_factory=dict)
    why_slots: str = ""
    pooling: Pooling = "last"
    grammars: GrammarCompiler = field(kw_only=True)

    @classmethod
    def start(cls, path: Path, engine: Engine, tokenizer: Any, why_slots: str = "") -> ServedModel:
        """Read what the server needs from a model directory and start the engine.

        Where generation_config.json has ``do_sample``, its sampling parameters become the defaults; otherwise OpenAI's
        apply, temperature 1 among them.

        Args:
            path: the model directory. engine: loaded from it, not started yet.
            tokenizer: of :func:`serving_tokenizer`. why_slots: of the engine's runner.
        """
        own = ServerTokenizer(tokenizer, size=engine.vocab_size, context=engine.context)
        settings = generation_defaults(path)
        sampled = bool(settings.get("do_sample"))
        defaults = {name: settings[name] for name in _DEFAULTS if sampled and settings.get(name) is not None}
        engine.start()
        ends = frozenset(stop_ids(path))
        grammars = GrammarCompiler(tokenizer.backend_tokenizer, engine.vocab_size, ends)
        return cls(engine, own, ends, defaults, why_slots, pooling_of(path), grammars=grammars)


def pooling_of(path: Path) -> Pooling:
    """How a model directory says that embeddings are made (sentence-transformers' file); the last state where it says
    nothing, or another way."""
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last"
    modes = {name for name, value in read_json(file).items() if name.startswith("pooling_mode_") and value is True}
    if modes == {"pooling_mode_mean_tokens"}:
        return "mean"
    return "last"


def serving_tokenizer(path: Path, chat_template: str | None = None, file: Path | None = None) -> Any:
    """The tokenizer of a model directory, for :meth:`ServedModel.start`, and its chat template tried. To be called
    before the weights are read, which may take minutes.

    Args:
        chat_template: Jinja source that replaces the tokenizer's. file: that it was read from.

    Raises:
        InputError: the tokenizer is missing or damaged, or the chat template broken.
    """
    tokenizer = quick_tokenizer(path, chat_template=chat_template)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError(f"{path}: the tokenizer has no tokenizer.json, which serving needs")
    check_chat_template(tokenizer, file or template_file(path))
    return tokenizer
