"""Tokenizers that are wholly described by tokenizer.json, without transformers, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import read_json
from .chat_template import LightTemplate

# Classes of transformers that take tokenizer.json as it is, and settings that change nothing in plain text. With any
# other, transformers knows better.
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_HARMLESS = {
    *("tokenizer_class", "backend", "model_max_length", "added_tokens_decoder", "model_input_names"),
    *("padding_side", "truncation_side", "name_or_path", "is_local", "clean_up_tokenization_spaces", *_NAMED),
}
_TOKEN_FILES = ("added_tokens.json", "special_tokens_map.json")
_TEMPLATE_FILE, _TEMPLATE_DIR = "chat_template.jinja", "additional_chat_templates"


class LightTokenizer:
    """What a transformers tokenizer does with text and with messages of text, by the same names.

    Args:
        backend: of the tokenizers library.
        special: texts of its special tokens by "bos_token", "eos_token", "unk_token" and "pad_token".
        chat_template: Jinja source, or None. It is compiled when it is first filled in: who only continues text needs
            no jinja2, and no template without faults.
    """

    def __init__(self, backend: Any, special: Mapping[str, str], chat_template: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = dict(special)
        self._template: LightTemplate | None = None
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids of a text, under "input_ids"."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = False,
        **options: Any,
    ) -> str:
        """Messages as the text that the model reads; ``options`` of :meth:`.chat_template.LightTemplate.__call__`,
        ``chat_template`` the tokenizer's own or None.

        Raises:
            ImportError, jinja2.TemplateError, ValueError: of :class:`.chat_template.LightTemplate`.
        """
        assert self.chat_template is not None and not tokenize and chat_template in (None, self.chat_template)
        if self._template is None:
            self._template = LightTemplate(self.chat_template, self.special_tokens_map)
        return self._template(messages, **options)


def light_tokenizer(path: str | Path, *, chat: bool = True, chat_template: str | None = None) -> LightTokenizer | None:
    """The tokenizer of a model directory, or None where transformers would do more than read its tokenizer.json: change
    it for the class it is of, or, where ``chat``, fill in one of several templates. ``chat_template`` replaces the
    directory's own."""
    path = Path(path)
    if not (path / "tokenizer.json").is_file() or not (path / "tokenizer_config.json").is_file():
        return None
    config = read_json(path / "tokenizer_config.json")
    if config.get("tokenizer_class") not in _CLASSES or not set(config) - {"chat_template"} <= _HARMLESS:
        return None
    if any((path / name).exists() for name in _TOKEN_FILES):
        return None
    source = chat_template
    if chat and source is None:
        source = _template_source(path, config)
        if (path / _TEMPLATE_DIR).exists() or not isinstance(source, str | None):
            return None
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception:
        # The library raises nothing narrower; transformers will say what is wrong.
        return None
    if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, BPE):
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = {name: _content(config[name]) for name in _NAMED if config.get(name)}
    if not all(isinstance(text, str) and text in special for text in named.values()):
        return None
    return LightTokenizer(backend, named, source or None)


def template_file(path: str | Path) -> Path:
    """The file of a model directory that its chat template is in."""
    file = Path(path) / _TEMPLATE_FILE
    return file if file.is_file() else Path(path) / "tokenizer_config.json"


def _template_source(path: Path, config: dict[str, Any]) -> Any:
    """The chat template of a model directory, whose file comes before the config's; of other forms than text too."""
    file = template_file(path)
    return file.read_text(encoding="utf-8") if file.name == _TEMPLATE_FILE else config.get("chat_template")


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
