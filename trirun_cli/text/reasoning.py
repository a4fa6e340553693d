"""What a model writes between ``<think>`` and ``</think>``, apart from its answer."""

from __future__ import annotations

from .overlap import overlap

OPEN, CLOSE = "<think>", "</think>"


def reasons(template: str | None) -> bool:
    """Whether a chat template knows of such reasoning."""
    return CLOSE in (template or "")


class ReasoningParser:
    """Splits a stream of text into reasoning and answer; the tags and the line breaks around them are part of neither.

    Args:
        inside: the prompt has opened the reasoning already; otherwise only a text that begins with the tag has any.
    """

    def __init__(self, inside: bool) -> None:
        self._held, self._state = "", "inside" if inside else "before"
        self._fresh = True

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain after more text."""
        self._held += text
        if self._state == "before":
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._held, self._state = start[len(OPEN) :], "inside"
            elif OPEN.startswith(start):
                return "", ""
            else:
                self._state, self._fresh = "after", False
        reasoning = ""
        if self._state == "inside":
            before, found, after = self._held.partition(CLOSE)
            if not found:
                keep = overlap(before, CLOSE)
                # Line breaks before the tag are not reasoning, and whether it comes is not known yet.
                sure = before[: len(before) - keep].rstrip("\n")
                self._held = before[len(sure) :]
                return self._trimmed(sure), ""
            reasoning = self._trimmed(before.rstrip("\n"))
            self._held, self._state, self._fresh = after, "after", True
        answer, self._held = self._trimmed(self._held), ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """The reasoning and the answer that were held back, at the end of the text."""
        held, self._held = self._held, ""
        return (held.rstrip("\n"), "") if self._state == "inside" else ("", held)

    def _trimmed(self, text: str) -> str:
        """Without the line breaks that the first piece of a part begins with."""
        if self._fresh and text:
            text = text.lstrip("\n")
            self._fresh = not text
        return text
