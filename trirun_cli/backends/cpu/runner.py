"""The native decoder of the CPU as a runner: decode rows and prompt chunks of all slots in one native step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import Segment, draw
from trirun_kernels.decoder.structs import DrawStruct

from ...engine.request import Request
from ...engine.runner import Done, Outcome, Work, in_order, token_outcomes
from ...engine.sampling import Token, plain_tokens
from ...engine.slot_cache import SlotCache
from .decoder import NativeDecoder
from .sampler import Draw, HostSampler, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

# Most steps of one native call.
BURST_STEPS = 128
# Prompts' rows of a step in which others decode. A row costs as much in a small step as in a large one once there are
# 48, the least block of the kernels: more rows would make readers wait and prompts no cheaper.
PROMPT_ROWS = 48


class CpuRunner:
    """Runs a :class:`NativeDecoder`; the tokens of a request are the same whatever else is in the batch."""

    lookahead, why_slower, why_slots, has_states = 0, "", "", True

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder
        self.name = decoder.name
        self.slots, self.context = decoder.slots, decoder.context
        self.max_rows, self.vocab_size = decoder.max_rows, decoder.shape.vocab
        self.prompt_rows = min(PROMPT_ROWS, self.max_rows)
        self.can_rewind = decoder.native.can_rewind
        copy = decoder.native.copy_prefix if self.can_rewind else None
        self.cache = SlotCache(self.slots, self.context, copy=copy, rewind=self.can_rewind)
        self._sampler = HostSampler(self.slots, self.vocab_size, _drawn)
        # Committed as far as it is used.
        self._logits = np.empty((self.max_rows, self.vocab_size), np.float32)
        self._logits_array = Array.of(self._logits)
        self._last = [0] * self.slots
        self._alternatives = [0] * self.slots
        self._stop_ids: list[frozenset[int]] = [frozenset()] * self.slots
        # Seconds of a step that decodes so many sequences, inf where none has been met.
        self._step_s = [inf] * (self.slots + 1)

    def prepare(self) -> None:
        """See :class:`~.runner.Runner`."""

    def bind(self, slot: int, request: Request, generated: Sequence[int]) -> None:
        """See :class:`~.runner.Runner`."""
        self._sampler.bind(slot, request, generated)
        self._alternatives[slot] = request.params.prompt_logprobs or 0
        self._stop_ids[slot] = frozenset() if request.params.ignore_stop_ids else request.stop_ids

    def burst(self, slots: Sequence[int], seconds: float) -> int:
        """See :class:`~.runner.BurstRunner`."""
        return max(1, min(BURST_STEPS, int(seconds / self._step_s[len(slots)])))

    def launch(self, work: Sequence[Work]) -> Done:
        """See :class:`~.runner.Runner`; it is over when this returns."""
        if any(item.states for item in work):
            return self._launch_with_states(work)
        started = perf_counter()
        tokens: list[int] = []
        wanted: list[int] = []
        segments, sampled = [], []
        for slot, position, piece, sample, targets, _ in work:
            first = len(tokens)
            if piece is None:
                tokens.append(self._last[slot])
            else:
                tokens += piece
            last = len(tokens)
            segments.append(Segment(slot, position, last - first))
            wanted += range(first, first + len(targets))
            if sample:
                wanted.append(last - 1)
                sampled.append(slot)
        logits = self._run(segments, tokens, wanted)
        elapsed = perf_counter() - started
        decodes = len(tokens) == len(wanted) == len(sampled)
        # A prompt takes no less than a step of one sequence; a step by itself, on cold caches, no less than one of a
        # burst.
        rows = len(tokens) if decodes else 1
        self._step_s[rows] = min(self._step_s[rows], elapsed)
        if decodes:
            return Done(token_outcomes(self._choose(logits, sampled)))
        return Done(self._outcomes(logits, work, sampled))

    def _launch_with_states(self, work: Sequence[Work]) -> Done:
        """In two native steps: of those that want hidden states, and of the others."""
        pooled, others = ([item for item in work if item.states == wanted] for wanted in (True, False))
        tokens = [token for item in pooled for token in item.tokens or ()]
        states = self._decoder.states([Segment(item.slot, item.position, item.rows) for item in pooled], tokens)
        found = np.split(states, np.cumsum([item.rows for item in pooled])[:-1])
        return Done(in_order(work, found, self.launch(others).outcomes if others else ()))

    def launch_burst(self, work: Sequence[Work], steps: int) -> Done:
        """See :class:`~.runner.BurstRunner`."""
        started = perf_counter()
        slots, rows = [item.slot for item in work], len(work)
        if not all(map(self._sampler.is_simple, slots)):
            return self._launch_step_by_step(work, steps)
        # No numpy here: what it touches is no longer in any cache after a burst.
        chosen = array("q", bytes(8 * steps * rows))
        stop_ids = sorted(frozenset().union(*(self._stop_ids[slot] for slot in slots)))
        draws = [self._sampler.draw_of(slot) for slot in slots]
        done = self._decoder.native.generate(
            slots,
            [item.position for item in work],
            [self._last[slot] for slot in slots],
            steps,
            stop_ids,
            Array(chosen.buffer_info()[0], "int64", (steps, rows), chosen),
            self._logits_array.rows(0, rows),
            list(map(_draw_struct, draws)) if any(draws) else (),
        )
        for slot in slots:
            self._sampler.skip(slot, done)
        self._step_s[rows] = (perf_counter() - started) / done
        outcomes = []
        for row, slot in enumerate(slots):
            ids = chosen[row : done * rows : rows].tolist()
            # A row of logits without a number ends the burst, with -1 in the place of its token.
            self._last[slot] = ids[-1]
            token, *more = plain_tokens(ids)
            outcomes.append(Outcome(token, more=tuple(more)))
        return Done(outcomes)

    def _launch_step_by_step(self, work: Sequence[Work], steps: int) -> Done:
        """A burst whose tokens are not the library's to choose: they are chosen here between its steps. Tokens that a
        grammar leaves no choice about are rows of the step after, as a prompt's are."""
        started, done, going = perf_counter(), 0, True
        slots, positions = [item.slot for item in work], [item.position for item in work]
        made: list[list[Token]] = [[] for _ in work]
        while going and max(map(len, made)) < steps:
            segments, tokens, wanted, room = [], list[int](), [], self.max_rows - len(work)
            for row, slot in enumerate(slots):
                forced = self._sampler.forced(slot, self._stop_ids[slot], min(room, steps - 1 - len(made[row])))
                room -= len(forced)
                made[row] += map(Token, forced)
                segments.append(Segment(slot, positions[row], 1 + len(forced)))
                positions[row] += 1 + len(forced)
                tokens += (self._last[slot], *forced)
                wanted.append(len(tokens) - 1)
            chosen = self._choose(self._run(segments, tokens, wanted), slots)
            for slot, row_made, token in zip(slots, made, chosen, strict=True):
                row_made.append(token)
                going = going and token.id >= 0 and token.id not in self._stop_ids[slot]
            done += 1
        self._step_s[len(work)] = (perf_counter() - started) / done
        return Done([Outcome(token, more=tuple(more)) for token, *more in made])

    def logits(self, slot: int, position: int, tokens: Sequence[int], keep: int) -> Tensor:
        """See :class:`~.runner.Runner`; a row's logits are the same bit for bit whatever ran beside it."""
        import torch

        return torch.from_numpy(self._decoder.forward(tokens, slot=slot, position=position, keep=keep))

    def batch_logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """See :class:`~.runner.Runner`: one after another, since a step gains nothing from more rows than a sequence
        has."""
        found = []
        for tokens, count in zip(sequences, keep, strict=True):
            admission = self.cache.admit(tokens, reuse=False)
            if admission is None:
                raise RuntimeError(f"{self.name}: no slot is free")
            found.append(self.logits(admission.slot, 0, tokens, count))
            self.cache.release(admission.slot, ())
        return found

    def close(self) -> None:
        """See :class:`~.runner.Runner`."""

    def _run(self, segments: Sequence[Segment], tokens: list[int], wanted: list[int]) -> np.ndarray:
        """One native step; the logits of the rows that are wanted, in memory that the next one writes."""
        count = len(wanted)
        self._decoder.native.run(segments, Array.ids(tokens), Array.ids(wanted), self._logits_array.rows(0, count))
        return self._logits[:count]

    def _choose(self, logits: np.ndarray, slots: Sequence[int]) -> list[Token]:
        chosen, last = self._sampler.sample(logits, slots), self._last
        for slot, token in zip(slots, chosen, strict=True):
            last[slot] = token.id
        return chosen

    def _outcomes(self, logits: np.ndarray, work: Sequence[Work], slots: Sequence[int]) -> list[Outcome]:
        """Of a step in which some prompts are scored, or end without a token to sample."""
        scores, rows, first = [], [], 0
        for item in work:
            last = first + len(item.targets)
            scores.append(token_logprobs(logits[first:last], item.targets, self._alternatives[item.slot]))
            if item.sample:
                rows.append(last)
            first = last + item.sample
        chosen = iter(self._choose(logits[rows], slots) if rows else ())
        return [Outcome(next(chosen) if item.sample else None, score) for item, score in zip(work, scores, strict=True)]


def _drawn(logits: np.ndarray, how: Draw) -> int:
    return draw(Array.of(logits), _draw_struct(how))


def _draw_struct(how: Draw | None) -> DrawStruct:
    if how is None:
        return DrawStruct(top_p=1.0)
    params = how.params
    # Beyond any vocabulary; the library takes 64 bits.
    top_k = min(params.top_k, 2**31)
    return DrawStruct(params.temperature, params.top_p, params.min_p, top_k, how.stream, how.index)
