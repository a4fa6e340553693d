"""Pieces of sequences as the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from trirun_kernels.decoder.cuda import Inputs, Segment


class Piece(NamedTuple):
    """Consecutive tokens of a slot, and of how many of the last ones the logits are wanted."""

    slot: int
    position: int
    tokens: Sequence[int]
    keep: int


def in_rows(pieces: Sequence[Piece], device: torch.device) -> tuple[list[int], Inputs, list[Segment], list[int]]:
    """Pieces as rows of one step: the order in which they are there, the rows, and those that are kept."""
    # Single tokens come first, as the decoder wants them.
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].tokens) > 1)
    rows: list[list[int]] = [[], [], []]
    segments: list[Segment] = []
    wanted: list[int] = []
    first = 0
    for i in order:
        slot, position, tokens, keep = pieces[i]
        count = len(tokens)
        rows[0] += tokens
        rows[1] += [slot] * count
        rows[2] += range(position, position + count)
        if count > 1:
            segments.append(Segment(first, count, slot, position))
        first += count
        wanted += range(first - keep, first)
    inputs = Inputs(*(torch.tensor(part, dtype=torch.int32, device=device) for part in rows))
    return order, inputs, segments, wanted
