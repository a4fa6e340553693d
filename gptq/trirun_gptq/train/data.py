"""Training text: one stream of tokens, cut at another offset in every epoch, and what the original model writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calibration import load_stream
from ..errors import QuantizationError


class Text:
    """Windows of a token stream, all of them once per epoch in a seeded order, each epoch cut at another offset.

    Which windows a step reads depends on its number alone, so that a resumed run reads what the stopped one would have.

    Args:
        stream: int64 [tokens]. seqlen: of a window. seed: of orders and offsets.

    Raises:
        QuantizationError: the stream is shorter than two windows.
    """

    def __init__(self, stream: Tensor, seqlen: int, seed: int) -> None:
        self.count = len(stream) // seqlen - 1
        if self.count < 1:
            raise QuantizationError(
                f"{len(stream)} tokens are left to train on, and two sequences of {seqlen} are the least; "
                "give more text, or ask for shorter sequences or fewer held-out ones"
            )
        self._stream, self._seqlen, self._seed = stream, seqlen, seed
        self._epoch, self._order, self._offset = -1, torch.empty(0), 0

    def read(self, first: int, count: int) -> Tensor:
        """Windows number ``first`` to ``first + count`` of the endless sequence of epochs: int64 [count, seqlen]."""
        windows = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                self._order = torch.randperm(self.count, generator=generator)
                self._offset = int(torch.randint(self._seqlen, (), generator=generator))
                self._epoch = epoch
            start = self._offset + int(self._order[place]) * self._seqlen
            windows.append(self._stream[start : start + self._seqlen])
        return torch.stack(windows)


class Batches:
    """What each step trains on: real text and generated sequences in a fixed proportion.

    Args:
        text: the real text. generated: int64 [sequences, seqlen], possibly none.
        share: fraction of a batch that is real text where there are generated sequences.
        batch: sequences per step over all devices. rank, ranks: this device and how many there are.
    """

    def __init__(
        self, text: Text, generated: Tensor, share: float, batch: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> None:
        if batch % ranks:
            raise QuantizationError(f"batch={batch} sequences cannot be split evenly over {ranks} devices")
        self._text, self._each, self._rank, self._ranks = text, batch // ranks, rank, ranks
        self._generated = Text(generated.flatten(), generated.shape[1], seed + 1) if len(generated) > 1 else None
        self._real = self._each if self._generated is None else round(self._each * share)

    def read(self, step: int) -> Tensor:
        """The sequences of one step on this device: int64 [batch / ranks, seqlen]."""
        place = step * self._ranks + self._rank
        parts = []
        if self._real:
            parts.append(self._text.read(place * self._real, self._real))
        rest = self._each - self._real
        if self._generated is not None and rest:
            parts.append(self._generated.read(place * rest, rest))
        return torch.cat(parts)


def load_text(sources: list[str], tokenizer: Any, seqlen: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """The token stream to train on, and held-out windows from the same sources.

    Every source gives held-out windows in proportion to its tokens, cut from its end (documents are shuffled before).

    Args:
        sources: see :func:`trirun_gptq.calibration.load`. tokenizer: of the model.

    Returns:
        int64 [tokens], and int64 [held_out, seqlen].

    Raises:
        QuantizationError: a source cannot be read, or all together are too short.
    """
    streams = [load_stream(source, tokenizer, seed) for source in sources]
    total = sum(map(len, streams))
    if total < (held_out + 2) * seqlen:
        raise QuantizationError(
            f"{', '.join(sources)}: {total} tokens; {held_out} held-out sequences of {seqlen} and two to train on "
            f"need {(held_out + 2) * seqlen}"
        )
    train, windows, left = [], [], held_out
    for number, stream in enumerate(streams):
        last = number == len(streams) - 1
        share = left if last else min(left, round(held_out * len(stream) / total), len(stream) // seqlen)
        cut = len(stream) - share * seqlen
        if cut < 0:
            raise QuantizationError(
                f"{sources[number]}: {len(stream)} tokens are too few for {share} held-out sequences"
            )
        train.append(stream[:cut])
        windows.append(stream[cut:].view(share, seqlen))
        left -= share
    return torch.cat(train), torch.cat(windows)
