"""The tokenizer as the server needs it: token ids of prompts, and the text and bytes of single tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from ..text.chat_template import LightTemplate
from ..text.tool_calls import for_template
from .bodies.openai import Message, TemplateFields
from .errors import ApiError
from .thread import Preparation

# Texts up to this length take about a millisecond; longer ones leave the event loop for a thread.
_INLINE_CHARACTERS = 2048
# Processor time of a chat template, far beyond what one of a long conversation takes.
_TEMPLATE_S = 1.0
T = TypeVar("T")


class ServerTokenizer:
    """A model's tokenizer, with the checks and lookups of the server.

    Args:
        tokenizer: of transformers and backed by the tokenizers library, or a
            :class:`~trirun_cli.text.tokenizer.LightTokenizer`.
        size: of the model's vocabulary; token ids are below it. context: most tokens of a sequence.
        chat_template: Jinja source that replaces the tokenizer's own; None keeps that.

    Attributes:
        special: ids of tokens that are no text, such as BOS. bos_id: of the BOS token, or None.
        preparation: the threads of what takes long.
        decode: text of token ids, by ``decode(ids, skip_special_tokens=...)``.
        chat_template, tool_template: Jinja sources, the second for conversations with tools; None without one.
        token_text: a token for people: its text, or ``bytes:\\xe2`` for a part of a character, as OpenAI writes it.
        token_bytes: the bytes of a token, also where they are no whole character; None where they cannot be known.
    """

    def __init__(self, tokenizer: Any, *, size: int, context: int, chat_template: str | None = None) -> None:
        self._tokenizer, self.size, self.context = tokenizer, size, context
        self.bos_id: int | None = tokenizer.bos_token_id
        # transformers' own decode inspects every id, which costs several times as much as the decoding, for each token
        # of every stream.
        cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self.decode: Callable[..., str] = tokenizer.decode if cleans_up else tokenizer.backend_tokenizer.decode
        template = chat_template or getattr(tokenizer, "chat_template", None)
        # A tokenizer may have several, by name.
        named = template if isinstance(template, dict) else {"default": template}
        self.chat_template: str | None = named.get("default")
        self.tool_template: str | None = named.get("tool_use", self.chat_template)
        self.preparation = Preparation()
        self._templates: dict[str, LightTemplate] = {}
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.special = frozenset(token for token, content in added.items() if content.special)
        pieces = self._backend.get_vocab()
        self._metaspace = any(piece.startswith("▁") for piece in pieces)
        # A longer text cannot fit, whatever its tokens; refusing it by its length saves seconds of tokenizing.
        self._most_characters = context * max(map(len, pieces), default=1)
        # The first call sets padding and truncation, which changes the tokenizer; later calls only read it, so several
        # threads may make them.
        tokenizer("a")
        self.token_text = lru_cache(maxsize=65_536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65_536)(self._token_bytes)

    @property
    def facts(self) -> dict[str, Any]:
        """What a client needs to know of the tokenizer, in the names of tokenizer_config.json."""
        special = {
            name: str(text) for name, text in self._tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {
            "model_max_length": self.context,
            "vocab_size": self.size,
            **{name: str(special[name]) if special.get(name) else None for name in names},
            "chat_template": self.chat_template,
        }

    async def encode(self, texts: Sequence[str], *, special: bool, param: str, fits: bool = True) -> list[list[int]]:
        """Token ids of texts.

        Args:
            special: adds the tokenizer's own tokens around each, such as BOS. param: the field that they are from.
            fits: a text that cannot fit the context is refused.

        Raises:
            ApiError: 400, a text is not valid Unicode or cannot fit the context, or they take too long.
        """
        names = [param if len(texts) == 1 else f"{param}[{index}]" for index in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            if fits:
                self._check_length(len(text), name)
        characters = sum(map(len, texts))
        return await self._prepared(
            characters,
            lambda: [self._ids(text, special, name) for name, text in zip(names, texts, strict=True)],
            param,
        )

    async def _prepared(self, size: int, work: Callable[[], T], param: str) -> T:
        return work() if size <= _INLINE_CHARACTERS else await self.preparation.run(work, param)

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of words, each at the beginning of a text and after a space, without special ones."""
        spelled = [self._ids(space + word.lstrip(), False, "bad_words") for word in words for space in ("", " ")]
        return [ids for ids in spelled if ids]

    def count(self, text: str) -> int:
        """Tokens of a text that the model wrote, without special ones; of a text from elsewhere by :meth:`encode`."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ids(self, text: str, special: bool, param: str) -> list[int]:
        try:
            text.encode()
        # JSON can hold half of a surrogate pair, which is not valid Unicode.
        except UnicodeEncodeError:
            raise ApiError(400, f"{param}: is not valid Unicode", param=param, code="invalid_value") from None
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._most_characters:
            context = f"the {self.context} tokens of the context (--ctx of the server)"
            message = f"{param} has {characters} characters, more than {context} can be"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def render(self, messages: Sequence[Message], body: TemplateFields) -> list[int]:
        """Token ids of a conversation; ``body`` says how the chat template is filled in.

        Raises:
            ApiError: 400, the model has no chat template, the template refuses the messages, or they are not valid
                Unicode or cannot fit the context.
        """
        source = self.tool_template if body.offers_tools else self.chat_template
        if not source:
            message = "this model has no chat template: use /v1/completions, or serve it with --chat-template FILE"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if body.offers_tools else None
        if tools and "tools" not in source:
            message = "this model's chat template knows nothing of tools"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        given = [message.model_dump(exclude_unset=True) for message in messages]
        # The template's own text is not known yet; the messages alone must fit.
        self._check_length(sum(len(message.get("content") or "") for message in given), "messages")
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}

        def template() -> list[int]:
            text = self._template(source)(
                for_template(given),
                tools=tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                seconds=_TEMPLATE_S,
                **(effort | (body.chat_template_kwargs or {})),
            )
            # Again, now with tools and everything else that the template adds.
            self._check_length(len(text), "messages")
            return self._ids(text, special=False, param="messages")

        try:
            return await self.preparation.run(template, "messages")
        except ApiError:
            raise
        # A template is a program: it may raise jinja2's errors on purpose and any of Python's by accident.
        except Exception as error:
            # The error may quote invalid Unicode from the messages; the response must be valid.
            reason = " ".join(str(error).split())[:300].encode(errors="backslashreplace").decode()
            message = f"the chat template does not take these messages: {reason}"
            raise ApiError(400, message, param="messages", code="invalid_value") from error

    def _template(self, source: str) -> LightTemplate:
        """The template, compiled once."""
        found = self._templates.get(source)
        return found or self._templates.setdefault(source, LightTemplate(source, self._tokenizer.special_tokens_map))

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            ApiError: 400, naming ``param``.
        """
        if ids and not (min(ids) >= 0 and max(ids) < self.size):
            wrong = next(token for token in ids if not 0 <= token < self.size)
            message = f"{param}: token id {wrong} is outside the model's vocabulary of {self.size}"
            raise ApiError(400, message, param=param, code="invalid_value")

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids with special tokens, for ``echo`` and /detokenize."""
        return self.decode(list(ids), skip_special_tokens=False)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """:meth:`text_of` any number of ids, without blocking the event loop.

        Raises:
            ApiError: 400, the model does not have an id.
        """
        self.check_ids(ids, "tokens")
        return await self._prepared(len(ids), lambda: self.text_of(ids), "tokens")

    def _token_bytes(self, token: int) -> bytes | None:
        piece = self._backend.id_to_token(token)
        if piece is None:
            # A model's vocabulary may be padded beyond its tokenizer's.
            return b""
        if token not in self.special:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            if self._metaspace:
                return piece.replace("▁", " ").encode()
        text = self.text_of([token])
        if "\ufffd" not in text:
            return text.encode()
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return None

    def _token_text(self, token: int) -> str:
        raw = self.token_bytes(token)
        if raw is None:
            return str(self._backend.id_to_token(token))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where each token of a text begins, in whole characters."""

    def __init__(self, tokenizer: ServerTokenizer) -> None:
        self._bytes, self._special, self._at = tokenizer.token_bytes, tokenizer.special, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, tokens: Sequence[int], text: str) -> list[int]:
        """The offsets of a prompt's tokens in ``text``, the prompt's own. Tokens and spaces that the tokenizer has
        added, such as BOS, are not in it and have no width."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            piece = self._piece(token)
            if not text.startswith(piece, self._at):
                bare = piece.removeprefix(" ")
                if token in self._special:
                    piece = ""
                elif text.startswith(bare, self._at):
                    piece = bare
            self._at = min(self._at + len(piece), len(text))
        self._at = len(text)
        return offsets

    def next(self, token: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._piece(token))
        return at

    def _piece(self, token: int) -> str:
        return self._decoder.decode(self._bytes(token) or b"")


def _byte_alphabet() -> dict[str, int]:
    """The inverse of GPT-2's map from bytes to printable characters."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
