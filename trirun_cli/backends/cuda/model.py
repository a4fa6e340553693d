"""The lean decoder on a GPU as a model that scores texts: logits of whole sequences, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_weights import CudaModel

from .runner import engine_name

# Tokens of one step, and sequences of one: their logits are what takes memory.
MAX_ROWS, MAX_SEQUENCES = 4096, 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive tokens of a slot, and of how many of the last ones the logits are wanted."""

    slot: int
    position: int
    tokens: Tensor
    keep: int


class CudaLM:
    """A :class:`~.model.CausalLM` and :class:`~.model.BatchLM`.

    Slot 0 holds the one sequence of ``forward``; the others are lent to the sequences of a batch, which run in pieces
    of at most 4096 tokens together.

    Args:
        positions: of the longest sequence.
        kv_dtype: of the cache, see :class:`CudaDecoder`.
    """

    can_rewind = True

    def __init__(self, model: CudaModel, *, positions: int, kv_dtype: torch.dtype | None = None) -> None:
        self._device, self.vocab_size, self.max_positions = model.device, model.shape.vocab, positions
        blocks, shared = -(-positions // ops.PAGE), MAX_ROWS // ops.PAGE + MAX_SEQUENCES
        # Pages of slot 0, then those that a batch shares: whole pieces, or one sequence of any length.
        self._shared = range(blocks, blocks + max(blocks, shared))
        self._decoder = CudaDecoder(
            model, slots=1 + MAX_SEQUENCES, context=positions, pages=self._shared.stop, kv_dtype=kv_dtype
        )
        self._decoder.block_tables[0] = torch.arange(blocks, device=model.device)
        self._length, self.engine = 0, engine_name(self._decoder)

    def reset(self) -> None:
        """See :class:`~.model.CausalLM`."""
        self._length = 0

    def rewind(self, length: int) -> None:
        """See :class:`~.model.CausalLM`."""
        self._length = length

    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """See :class:`~.model.CausalLM`."""
        logits = self._sequence(0, self._length, tokens, 1 if last_only else len(tokens))
        self._length += len(tokens)
        return logits

    def forward_batch(self, sequences: list[Tensor], keep: list[int]) -> list[Tensor]:
        """See :class:`~.model.BatchLM`."""
        out: list[Tensor] = []
        while len(out) < len(sequences):
            first = last = len(out)
            rows = 0
            while last < len(sequences) and last - first < MAX_SEQUENCES and rows + len(sequences[last]) <= MAX_ROWS:
                rows += len(sequences[last])
                last += 1
            last = max(last, first + 1)  # one that is longer than a step runs alone
            self._lend(sequences[first:last])
            if last == first + 1:
                out.append(self._sequence(1, 0, sequences[first], keep[first]))
            else:
                group = zip(sequences[first:last], keep[first:last], strict=True)
                out += self._step([_Piece(1 + i, 0, tokens, count) for i, (tokens, count) in enumerate(group)])
        return out

    def _lend(self, sequences: Sequence[Tensor]) -> None:
        """Give pages to slots 1, 2, ..."""
        tables = torch.zeros(len(sequences), self._decoder.block_tables.shape[1], dtype=torch.int32)
        page = self._shared.start
        for table, tokens in zip(tables, sequences, strict=True):
            count = -(-len(tokens) // ops.PAGE)
            table[:count] = torch.arange(page, page + count)
            page += count
        self._decoder.block_tables[1 : 1 + len(sequences)] = tables.to(self._device)

    def _sequence(self, slot: int, position: int, tokens: Tensor, keep: int) -> Tensor:
        """Logits of a sequence's last ``keep`` tokens, in as many steps as it needs."""
        parts, left = [], len(tokens)
        for piece in tokens.split(MAX_ROWS):
            left -= len(piece)
            wanted = min(max(keep - left, 0), len(piece))
            parts += self._step([_Piece(slot, position, piece, wanted)])
            position += len(piece)
        return torch.cat(parts)

    @torch.inference_mode()
    def _step(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """float32 logits [keep, vocab] of each piece."""
        # Single tokens come first, as the decoder wants them.
        order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].tokens) > 1)
        rows: list[Tensor] = []
        segments, wanted, first = [], [], 0
        for i in order:
            piece = pieces[i]
            count = len(piece.tokens)
            positions = torch.arange(piece.position, piece.position + count)
            rows.append(torch.stack((piece.tokens.cpu(), torch.full((count,), piece.slot), positions)))
            if count > 1:
                segments.append(Segment(first, count, piece.slot, piece.position))
            first += count
            wanted.append(torch.arange(first - piece.keep, first))
        with torch.cuda.device(self._device):
            inputs = Inputs(*torch.cat(rows, 1).to(self._device, torch.int32).unbind(0))
            logits = self._decoder.forward(inputs, segments, torch.cat(wanted).to(self._device))
            found = logits.float().split([len(part) for part in wanted])
        return [part for _, part in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]
