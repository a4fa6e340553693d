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
    """What a transformers tokenizer does with plain text, and with messages of plain text, by the same names.

    Args:
        backend: of the tokenizers library. bos, eos: the names of its special tokens, or None.
        chat_template: source of the chat template, or None. template: the same, ready to be filled in.
    """

    def __init__(
        self,
        backend: Any,
        bos: str | None,
        eos: str | None,
        chat_template: str | None = None,
        template: LightTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template, self._template = backend, chat_template, template
        self.bos_token_id = None if bos is None else backend.token_to_id(bos)
        self.eos_token_id = None if eos is None else backend.token_to_id(eos)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Token ids of a text, under "input_ids"."""
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False, tokenize: bool = False
    ) -> str:
        """Messages of "role" and "content" as the text that the model reads."""
        assert self._template is not None and not tokenize
        return self._template(messages, add_generation_prompt=add_generation_prompt)


def light_tokenizer(path: str | Path, *, chat: bool = True, rich: bool = False) -> LightTokenizer | None:
    """The tokenizer of a model directory, or None where transformers would do more than read its tokenizer.json: change
    it for the class it is of, or, where ``chat``, fill in a template with more than messages of plain text, or one that
    jinja2 alone does not take. ``rich``: messages may have more, as calls of tools."""
    path = Path(path)
    if not (path / "tokenizer.json").is_file() or not (path / "tokenizer_config.json").is_file():
        return None
    config = read_json(path / "tokenizer_config.json")
    if config.get("tokenizer_class") not in _CLASSES or not set(config) - {"chat_template"} <= _HARMLESS:
        return None
    if any((path / name).exists() for name in _TOKEN_FILES):
        return None
    source = _template_source(path, config) if chat else None
    if (chat and (path / _TEMPLATE_DIR).exists()) or not isinstance(source, str | None) or (rich and source):
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
    if not special.issuperset(named.values()):
        return None
    template = None
    if source:
        try:
            template = LightTemplate(source, named)
        except Exception:
            # transformers has statements of its own, or will say what is wrong.
            return None
    return LightTokenizer(backend, named.get("bos_token"), named.get("eos_token"), source, template)


def _template_source(path: Path, config: dict[str, Any]) -> Any:
    """The chat template of a model directory, whose file comes before the config's; of other forms than text too."""
    file = path / _TEMPLATE_FILE
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token
