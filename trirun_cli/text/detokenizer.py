"""Between text and tokens: the model's tokenizer, chat templates, streaming detokenization, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError
from ..resources import configs_dir
from .overlap import overlap
from .tokenizer import light_tokenizer


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer that lies in a model directory, as transformers loads it.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    # The libraries raise of a damaged file whatever it makes them stumble over.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: no usable tokenizer ({reason[:200]})") from error


def quick_tokenizer(path: str | Path, *, chat: bool = True, chat_template: str | None = None) -> Any:
    """:func:`load_tokenizer` for those who encode and decode text, and messages of text, and nothing else: transformers
    is not imported where it has nothing to add.

    Args:
        chat: False says that a chat template, if there is one, will not be asked for.
        chat_template: Jinja source that replaces the tokenizer's own.
    """
    light = light_tokenizer(path, chat=chat, chat_template=chat_template)
    if light is not None:
        return light
    full = load_tokenizer(path)
    if chat_template is not None:
        full.chat_template = chat_template
    return full


def read_text(path: Path | None) -> tuple[str, str]:
    """A UTF-8 text file and its name, or the held-out excerpt that ships with the demo model.

    Raises:
        InputError: it is missing or not UTF-8.
    """
    text, name, _ = read_text_and_bytes(path)
    return text, name


def read_text_and_bytes(path: Path | None) -> tuple[str, str, bytes]:
    """:func:`read_text`, and the bytes that lie in the file, whose lines may end in other ways. It is read once, as a
    pipe can be."""
    file = path or configs_dir() / "demo-model" / "valid.txt"
    try:
        content = file.read_bytes()
        return TextIOWrapper(BytesIO(content), encoding="utf-8").read(), file.name, content
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error}") from error


def encode_prompt(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt, as one user message through the chat template when ``chat``.

    Raises:
        InputError: chat is wanted and the tokenizer has no template, or the prompt is no Unicode or has no tokens at
            all.
    """
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    ids = token_ids(tokenizer, prompt, special=True)
    if not ids and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id]
    if not ids:
        raise InputError("the prompt is empty and the tokenizer has no beginning-of-text token")
    return ids


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of :func:`render_chat`'s text."""
    return token_ids(tokenizer, render_chat(tokenizer, messages), special=False)


def token_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text; ``special`` adds what the tokenizer puts around one, as a BOS token.

    Raises:
        InputError: the text is no Unicode, as an argument of the command line need not be.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is not UTF-8, or half a character: {error}") from None
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def require_chat_template(tokenizer: Any) -> None:
    """Raises InputError where a tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this model's tokenizer has no chat template", "trirun generate continues plain text")


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """A conversation as the model reads it, up to where its answer begins.

    Args:
        messages: of "role" (system, user or assistant) and "content".

    Raises:
        InputError: the tokenizer has no chat template, or its template refuses the conversation or fails.
    """
    require_chat_template(tokenizer)
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise InputError(f"the model's chat template refuses the conversation: {error}") from error
    # A template is a program, and no source of one may be anything.
    except Exception as error:
        raise InputError(f"the model's chat template fails: {type(error).__name__}: {error}") from error


class Taken(NamedTuple):
    """What tokens made certain: text, and how many of the tokens belong to the answer, fewer than all only where a stop
    string ends it before the rest."""

    text: str
    tokens: int


class Detokenizer:
    """Turns a stream of token ids into a stream of text, whole characters only, which a stop string ends.

    Args:
        tokenizer: of the model. prompt: the ids before the first generated one, which leading spaces depend on.
        stop: strings that end the text. They are found across token borders; of several, the first in the text counts.
        include_stop: the stop string that ends the text is part of it.
        min_tokens: the text of so many tokens is not searched for stop strings.
        special: special tokens are text too.

    Attributes:
        stopped: a stop string has been met; nothing comes after it. matched: which, or None.

    Example:
        >>> detokenizer = Detokenizer(tokenizer, prompt_ids, stop=("\\n",))
        >>> for ids in ([464, 5417], [373]):
        ...     print(detokenizer.take(ids).text, end="")
        >>> print(detokenizer.take([], last=True).text)
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        special: bool = False,
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        # A few ids of context settle how the first piece is spaced; the whole prompt would be decoded at every step.
        self._ids = self._last(prompt, 8)
        text = self._decode(self._ids)
        self._shown = len(text)
        # A prompt of token ids may end in the middle of a character, which is new text when it is complete.
        self._unfinished = text if text.endswith("\ufffd") else ""
        self._waiting = 0
        self._held = ""
        self._stop, self._include_stop, self._unsearched = stop, include_stop, min_tokens
        self.stopped = False
        self.matched: str | None = None

    def take(self, tokens: Sequence[int], *, last: bool = False) -> Taken:
        """The text that is certain after more tokens, and how many of them belong to the answer.

        Args:
            last: no more will come, so what was held back is text too.
        """
        # Where a stop string may end it, every token by itself: those after it are not part of the answer.
        pieces, count = [], len(tokens)
        if self._stop:
            for index, token in enumerate(tokens):
                if self.stopped:
                    count = index
                    break
                pieces.append(self.push(token))
        else:
            pieces.append(self.extend(tokens))
        if last:
            pieces.append(self.flush())
        return Taken("".join(pieces), count)

    def push(self, token: int) -> str:
        """Text that is certain after one more token; may be empty."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self._unsearched -= 1
        text = self._decode(self._ids)
        # A character cut in the middle of its bytes decodes to U+FFFD: wait for the rest, three tokens at most.
        self._waiting = self._waiting + 1 if text.endswith("\ufffd") else 0
        if 0 < self._waiting < 4:
            return ""
        return self._advance(text)

    def extend(self, tokens: Sequence[int]) -> str:
        """What :meth:`push` gives for these tokens one after another, mostly for the price of one."""
        # Which token completes a stop string, or a character, is a matter of single ones.
        if len(tokens) > 1 and not self._stop:
            ids = [*self._ids, *tokens]
            text = self._decode(ids)
            if "\ufffd" not in text:
                self._ids, self._waiting = ids, 0
                return self._advance(text)
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        """What is still held back when generation ends."""
        if self.stopped:
            return ""
        rest = self._release(self._decode(self._ids)[self._shown :]) + ("" if self.stopped else self._held)
        self._held = ""
        return rest

    def _advance(self, text: str) -> str:
        if not text.startswith(self._unfinished):
            self._shown = len(self._unfinished.rstrip("\ufffd"))
        self._unfinished = ""
        # After bytes that are no character, the last ones may still begin one: three where every byte is a token.
        unsure = min(len(text) - len(text.rstrip("\ufffd")), 3)
        end = max(self._shown, len(text) - unsure)
        new, self._shown = text[self._shown : end], end
        if len(self._ids) > 64:
            self._ids = self._last(self._ids, 16)
            self._shown = max(len(self._decode(self._ids)) - (len(text) - end), 0)
        return self._release(new)

    def _last(self, ids: Sequence[int], count: int) -> list[int]:
        # The rest of a character cut in two would make the bytes after it no characters either: up to three more.
        ends = [list(ids[-size:]) for size in range(count, count + 4)]
        return next((end for end in ends if not self._decode(end).startswith("\ufffd")), ends[0])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not self._special)

    def _release(self, new: str) -> str:
        text = self._held + new
        if self._unsearched >= 0:
            return text
        found = [(at, len(stop)) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            at, length = min(found)
            self.matched = text[at : at + length]
            return text[: at + length] if self._include_stop else text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
