"""The native decoder on a GPU as a runner.

A step in which every slot adds one token is one captured CUDA graph per batch size, from the embedding to the sampled
token: it reads what the step before has left on the device, so the next one can be launched before this one's tokens
are known. Only the masks of grammars need these tokens, and only the sampler needs the masks, so it is a graph of its
own, launched once they are there: where a thread makes many of them, at the beginning of the next launch. Steps with
pieces of prompts run the same kernels uncaptured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_cache import widest_window

from ...engine.paged_cache import PagedCache
from ...engine.request import Request
from ...engine.runner import Work
from .graphs import StepGraph, captured
from .pending import CudaPending, CudaPooled
from .pieces import Piece, in_rows
from .sampler import RING, CudaSampler, Reading

# Batch sizes that have a graph: a step is padded to the next one.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_ROWS = 2048  # tokens of a step that runs prompts


def runner_name(decoder: CudaDecoder) -> str:
    """What runs a model, for people."""
    model = decoder.model
    kind = str(model.dtype).removeprefix("torch.")
    weights = f"{model.act_bits}-bit activations" if model.packed else "dense"
    cache = ", int8 cache" if decoder.scales is not None else ""
    rows = ", ".join(map(str, decoder.step_rows))
    steps = f", steps of {rows} row{'s' if ',' in rows else ''} in one kernel" if rows else ""
    return f"native decoder on {torch.cuda.get_device_name(model.device)}, {weights}, {kind}{cache}{steps}"


class CudaRunner:
    """Runs a :class:`CudaDecoder`.

    Args:
        decoder: with a page more than its slots share, page 0, to which rows that only fill up a batch may write.
        max_rows: most tokens of a step. logit_scale: the factor of logits that the last norm's weights hold.
    """

    lookahead, why_slower, why_slots, has_states = 1, "", "", True

    def __init__(self, decoder: CudaDecoder, *, max_rows: int = MAX_ROWS, logit_scale: float = 1.0) -> None:
        model, device = decoder.model, decoder.model.device
        self._decoder, self._device, self._logit_scale = decoder, device, logit_scale
        self.name = runner_name(decoder)
        self.slots, self.context, self.vocab_size = decoder.slots, decoder.context, model.shape.vocab
        self.max_rows = self.prompt_rows = max(max_rows, self.slots)
        self.can_rewind = not model.shape.deltas and decoder.windowed_pages is None
        self.cache = PagedCache(
            self.slots, decoder.pages, self.context, page_size=ops.PAGE, reuse=not model.shape.deltas,
            window=widest_window(model.shape), windowed_pages=decoder.windowed_pages,
        )  # fmt: skip
        self._sampler = CudaSampler(self.slots, self.vocab_size, decoder.latest)
        self._buckets = [size for size in BUCKETS if size < self.slots]
        self._buckets.append(self.slots if self.slots > BUCKETS[-1] else min(b for b in BUCKETS if b >= self.slots))
        largest = self._buckets[-1]
        self._static = torch.zeros(3, largest, dtype=torch.int32, device=device)
        self._static[1] = -1
        self._inputs = Inputs(*self._static.unbind(0))
        # Slots and positions of the graphs' inputs once the last step has ended, for as long as nothing else was
        # launched: each row goes on from the token that it has sampled.
        self._expected: tuple[Sequence[int], Sequence[int]] | None = None
        self._tables = self.cache.tables.copy()
        self._staging = [torch.zeros(3, self.max_rows, dtype=torch.int32).pin_memory() for _ in range(RING)]
        self._staged_tables = [torch.from_numpy(self._tables).clone().pin_memory() for _ in range(RING)]
        self._turn = 0
        self._graphs: dict[int, StepGraph] = {}
        self._last: CudaPending | None = None

    def prepare(self) -> None:
        """See :class:`~.engine.runner.Runner`: captures a graph per batch size."""
        if not self._graphs:
            with torch.cuda.device(self._device), torch.inference_mode():
                self._graphs = captured(self._decoder, self._sampler, self._inputs, self._buckets)

    def bind(self, slot: int, request: Request, generated: Sequence[int]) -> None:
        """See :class:`~.engine.runner.Runner`."""
        with torch.cuda.device(self._device), torch.inference_mode():
            self._sample_last()
            self._sampler.bind(slot, request, generated)

    def launch(self, work: Sequence[Work]) -> CudaPending | CudaPooled:
        """See :class:`~.engine.runner.Runner`."""
        self._turn = (self._turn + 1) % RING
        with torch.cuda.device(self._device), torch.inference_mode():
            # Before the sampler, so that the model's kernels follow it at once.
            self._copy_tables()
            if not any(item.states for item in work):
                return self._step(work)
            self._sample_last()
            pooled, others = ([item for item in work if item.states == wanted] for wanted in (True, False))
            states = self._states([Piece(item.slot, item.position, item.tokens or (), 0) for item in pooled])
            return CudaPooled(work, states, self._step(others) if others else None)

    def logits(self, slot: int, position: int, tokens: Sequence[int], keep: int) -> Tensor:
        """See :class:`~.engine.runner.Runner`."""
        found: list[Tensor] = []
        left = len(tokens)
        for first in range(0, len(tokens), self.max_rows):
            piece = tokens[first : first + self.max_rows]
            left -= len(piece)
            found += self._logits([Piece(slot, position + first, piece, min(max(keep - left, 0), len(piece)))])
        return torch.cat(found)

    def batch_logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """See :class:`~.engine.runner.Runner`: as many side by side as fit a step, its slots and its pages."""
        out: list[Tensor] = []
        while len(out) < len(sequences):
            pieces: list[Piece] = []
            rows = 0
            for tokens, count in zip(sequences[len(out) :], keep[len(out) :], strict=True):
                rows += len(tokens)
                # One that is longer than a step runs alone.
                admission = self.cache.admit(tokens, reuse=False) if rows <= self.max_rows or not pieces else None
                if admission is None:
                    break
                pieces.append(Piece(admission.slot, 0, tokens, count))
            if not pieces or not all(self.cache.grow(piece.slot, len(piece.tokens)) for piece in pieces):
                raise RuntimeError(f"{self.name}: the cache has no room for {len(sequences[len(out)])} tokens")
            if len(pieces) == 1:
                out.append(self.logits(pieces[0].slot, 0, pieces[0].tokens, pieces[0].keep))
            else:
                out += self._logits(pieces)
            for piece in pieces:
                self.cache.release(piece.slot, ())
        return out

    def close(self) -> None:
        """See :class:`~.engine.runner.Runner`."""
        torch.cuda.synchronize(self._device)
        self._graphs = {}

    def _sample_last(self) -> None:
        if self._last is not None:
            self._last.sample()
            self._last = None

    def _sampling(self, pending: CudaPending, slots: Sequence[int]) -> CudaPending:
        """A step whose model is launched; its sampler, too, unless it has to wait for masks."""
        if self._sampler.ask(slots):
            self._last = pending
        else:
            pending.sample()
        return pending

    def _step(self, work: Sequence[Work]) -> CudaPending:
        # Column by column: a step of many rows spends most of the host's time on one after another.
        slots, positions, tokens, samples, targets, _ = zip(*work, strict=True)
        if all(samples) and not any(targets) and max(map(len, filter(None, tokens)), default=1) == 1:
            return self._decode(slots, positions, tokens)
        self._sample_last()
        return self._mixed(work)

    def _states(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Hidden states, float32 [tokens, hidden], of each piece, in one step."""
        order, inputs, segments, _ = in_rows(pieces, self._device)
        # Other rows than those of the graphs' inputs are the last ones now.
        self._expected = None
        states = self._decoder.states(inputs, segments).float() / self._logit_scale
        found = dict(zip(order, states.split([len(pieces[i].tokens) for i in order]), strict=True))
        return [found[i] for i in range(len(pieces))]

    def _logits(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """float32 logits [keep, vocab] of each piece, in one step."""
        # Nothing is collected between two of these calls, so no pinned buffer of the ring is known to be free.
        np.copyto(self._tables, self.cache.tables)
        self._expected = None
        with torch.cuda.device(self._device), torch.inference_mode():
            self._decoder.block_tables.copy_(torch.from_numpy(self._tables))
            order, inputs, segments, wanted = in_rows(pieces, self._device)
            kept = torch.tensor(wanted, dtype=torch.int64, device=self._device)
            logits = self._decoder.forward(inputs, segments, kept)
            found = dict(zip(order, logits.float().split([pieces[i].keep for i in order]), strict=True))
        return [found[i] for i in range(len(pieces))]

    def _copy_tables(self) -> None:
        if not np.array_equal(self._tables, self.cache.tables):
            np.copyto(self._tables, self.cache.tables)
            staged = self._staged_tables[self._turn]
            np.copyto(staged.numpy(), self._tables)
            self._decoder.block_tables.copy_(staged, non_blocking=True)

    def _decode(
        self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[Sequence[int] | None]
    ) -> CudaPending:
        count = len(slots)
        size = next(bucket for bucket in self._buckets if bucket >= count)
        goes_on = self._expected == (slots, positions) and tokens.count(None) == count
        self._sample_last()
        if not goes_on:
            staged = self._staging[self._turn][:, : self._static.shape[1]]
            wanted = staged.numpy()
            wanted[:] = [[0], [-1], [0]]
            wanted[0, :count] = [-1 if ids is None else ids[0] for ids in tokens]
            wanted[1, :count], wanted[2, :count] = slots, positions
            self._static.copy_(staged, non_blocking=True)
        graph = self._graphs[size]
        graph.model.replay()
        self._expected = slots, tuple(position + 1 for position in positions)

        def sampled(turn: int = self._turn) -> Reading:
            self._sampler.constrain()
            graph.samplers[turn].replay()
            return self._sampler.read(graph.logits, slots, turn)

        return self._sampling(CudaPending(self._decoder, sampled), slots)

    def _mixed(self, work: Sequence[Work]) -> CudaPending:
        # Single tokens first, whatever they continue; pieces of prompts after them.
        order = sorted(range(len(work)), key=lambda i: work[i].rows > 1)
        staged = self._staging[self._turn].numpy()
        segments: list[Segment] = []
        # (row of the batch, slot), and the token whose log-probability is wanted of it.
        sampled: list[tuple[int, int]] = []
        scored: list[tuple[int, int, int]] = []
        rows = 0
        prompts: list[tuple[int, int]] = [(0, 0)] * len(work)
        places: list[int | None] = [None] * len(work)
        for i in order:
            slot, position, tokens, sample, targets, _ = work[i]
            count = work[i].rows
            last = rows + count
            staged[0, rows:last] = -1 if tokens is None else tokens
            staged[1, rows:last] = slot
            staged[2, rows:last] = range(position, position + count)
            if count > 1:
                segments.append(Segment(rows, count, slot, position))
            if sample:
                places[i] = len(sampled)
                sampled.append((last - 1, slot))
            prompts[i] = len(scored), len(targets)
            scored.extend((rows + j, slot, target) for j, target in enumerate(targets))
            rows = last
        device_rows = self._staging[self._turn][:, :rows].to(self._device, non_blocking=True)
        wanted = torch.tensor([row for row, *_ in sampled] + [row for row, *_ in scored], dtype=torch.int64)
        inputs = Inputs(*(part.contiguous() for part in device_rows.unbind(0)))
        self._expected = None
        logits = self._decoder.forward(inputs, segments, wanted.to(self._device))
        if not len(wanted):
            return CudaPending(self._decoder, None, places, prompts)
        slots = [slot for _, slot in sampled]

        def read(turn: int = self._turn) -> Reading:
            self._sampler.constrain()
            if slots:
                device_slots = torch.tensor(slots, dtype=torch.int32).to(self._device)
                self._sampler.sample(logits[: len(slots)], device_slots, turn=turn)
            return self._sampler.read(logits, slots, turn, [(slot, target) for _, slot, target in scored])

        return self._sampling(CudaPending(self._decoder, read, places, prompts), slots)
