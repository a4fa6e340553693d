"""Whether a text that comes in pieces ends in the beginning of a mark."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``: it may still become one."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
