"""GPT-OSS' answers (OpenAI's "harmony" format): messages in channels, of which one is reasoning, one the answer.

<|channel|>analysis<|message|>Let me see.<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>It is one.<|return|>
"""

from __future__ import annotations

import re
from typing import Any

from .overlap import overlap
from .tool_parsers import JsonParser

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
_START = "<|start|>"
# What ends the text of a message.
_MARKS = (CHANNEL, _START, CALL, "<|end|>", "<|return|>")
_ANY_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def has_channels(template: str | None) -> bool:
    """Whether a chat template is for a model that writes channels."""
    return CHANNEL in (template or "")


class ChannelParser:
    """Splits a stream of text into reasoning and answer, as :class:`.reasoning.ReasoningParser` does. Calls of tools
    are part of the answer, ``<|channel|>...<|message|>...<|call|>``, for :class:`HarmonyParser`."""

    def __init__(self) -> None:
        self._held, self._header = "", False
        self._kind = "answer"

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain after more text."""
        found = {"reasoning": "", "answer": ""}
        self._held += text
        while True:
            if self._header:
                header, done, rest = self._held.partition(MESSAGE)
                if not done:
                    break
                self._held, self._header = rest, False
                found["answer"] += self._begin(header)
                continue
            mark = _ANY_MARK.search(self._held)
            if mark is None:
                sure = len(self._held) - _half_a_mark(self._held)
                found[self._place] += self._held[:sure]
                self._held = self._held[sure:]
                break
            found[self._place] += self._held[: mark.start()]
            self._held = self._held[mark.end() :]
            if self._kind == "call":
                found["answer"] += CALL
            self._kind, self._header = "answer", mark[0] in (CHANNEL, _START)
        return found["reasoning"], found["answer"]

    def flush(self) -> tuple[str, str]:
        """The reasoning and the answer that were held back, at the end of the text; half a header is neither."""
        held, self._held = "" if self._header else self._held, ""
        return (held, "") if self._place == "reasoning" else ("", held)

    @property
    def _place(self) -> str:
        return "reasoning" if self._kind == "reasoning" else "answer"

    def _begin(self, header: str) -> str:
        """Begin a message; what the answer has of its header."""
        channel = header.rpartition(CHANNEL)[2].split()[:1]
        if _RECIPIENT.search(header):
            self._kind = "call"
            return CHANNEL + header.replace(CHANNEL, " ") + MESSAGE
        self._kind = "reasoning" if channel == ["analysis"] else "answer"
        return ""


class HarmonyParser(JsonParser):
    """Calls of functions in an answer of :class:`ChannelParser`, or bare JSON; calls of anything else stay text."""

    def __init__(self) -> None:
        super().__init__()
        self._kept, self._inside = "", False

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """See :class:`.tool_parsers.ToolParser`."""
        content, calls = "", []
        self._kept += text
        while True:
            before, found, after = self._kept.partition(CALL if self._inside else CHANNEL)
            if not found:
                break
            if self._inside:
                made = self._call(before)
                content += "" if made else CHANNEL + before + CALL
                calls += made
            else:
                content += super().feed(before)[0]
            self._kept, self._inside = after, not self._inside
        if not self._inside:
            sure = len(self._kept) - _half_a_mark(self._kept)
            content += super().feed(self._kept[:sure])[0]
            self._kept = self._kept[sure:]
        return content, calls

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """See :class:`.tool_parsers.ToolParser`. What ends a call is a stop token, and no part of the text."""
        kept, self._kept = self._kept, ""
        content = "" if self._inside else super().feed(kept)[0]
        rest, calls = super().flush()
        if self._inside:
            made = self._call(kept)
            return (rest, calls + made) if made else (rest + CHANNEL + kept, calls)
        return content + rest, calls

    def _call(self, text: str) -> list[dict[str, Any]]:
        header, _, body = text.partition(MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient is None or not recipient[1].startswith("functions."):
            return []
        name = recipient[1].removeprefix("functions.")
        return self._calls(f'{{"name": "{name}", "arguments": {body.strip() or "{}"}}}') or []


def _half_a_mark(text: str) -> int:
    """Characters at the end of a text that a mark may begin with."""
    return max(overlap(text, mark) for mark in _MARKS)
