"""Which requests run next, and how much of each.

First come, first served, with continuous batching: every step advances each running request by one token and gives
the rows that are left to prompts, oldest first, in chunks of whatever fits, at most ``prompt_rows`` in all (chunked
prefill, Agrawal et al. 2023, "SARATHI"), so that a long prompt never holds up those who are reading. A request is
admitted when its prompt fits the cache. Nothing is reserved for what it will generate: when the cache is full the
request admitted last is preempted, to be continued, from what it has by then, before any other that waits (preemption
by recomputation, Kwon et al. 2023, "PagedAttention"). The one admitted first is never preempted, so there is always
progress.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from .runner import BurstRunner, Runner, Work, next_tokens
from .sampling import each_made
from .sequence import Sequence

# How long a burst may take: where nobody comes meanwhile, text should still flow; where others come, they wait for it.
ALONE_BURST_S, SHARED_BURST_S = 0.05, 0.02


class Share(NamedTuple):
    """A sequence's share of a step, in the turn that it has then."""

    sequence: Sequence
    turn: int
    work: Work


class Step(NamedTuple):
    """What is launched at once: one step, or, where every share decodes, a burst of several."""

    shares: list[Share]
    steps: int


class Scheduler:
    """The waiting line and the running requests of one runner.

    Attributes:
        waiting, running: the line, and who runs in the order of admission. burst_s: how long a burst may take.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._cache = runner, runner.cache
        self._burst = runner if isinstance(runner, BurstRunner) else None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.burst_s = ALONE_BURST_S
        self.preemptions = self.prompt_tokens = self.reused_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new request at the end of the line."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that has ended, wherever it is, and free its slot."""
        if sequence.slot < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free(sequence)

    def clear(self) -> None:
        """Forget every request, and leave the cache as it is: what held it is lost."""
        self.running.clear()
        self.waiting.clear()

    def schedule(self) -> Step:
        """What runs next, in order of slots; no shares when nothing can run."""
        before = self.preemptions
        shares = self._decode()
        decoding = len(shares)
        budget = self._runner.max_rows - decoding
        if decoding:
            budget = min(budget, self._runner.prompt_rows)
        for sequence in tuple(self.running) if decoding < len(self.running) else ():
            if budget and sequence.slot >= 0 and sequence.computed < sequence.needed:
                # Who is preempted for it has no share yet.
                share = self._prefill(sequence, budget, may_preempt=not shares)
                if share is None:
                    break
                shares.append(share)
                budget -= share.work.rows
        while budget and self.waiting and self.preemptions == before and self._admit(self.waiting[0]):
            share = self._prefill(self.waiting.popleft(), budget, may_preempt=False)
            if share is None:
                break
            shares.append(share)
            budget -= share.work.rows
        shares.sort(key=_slot_of)
        if self._burst is None or not shares or len(shares) > decoding:
            return Step(shares, 1)
        return Step(shares, self._steps(self._burst, shares))

    def launched(self, shares: list[Share]) -> None:
        """The shares have been launched: what they compute may be built upon."""
        for sequence, _, work in shares:
            if work.tokens is not None:
                self._cache.computed(sequence.slot, sequence.computed)

    def _decode(self) -> list[Share]:
        grow = self._cache.grow
        going: list[Sequence] = []
        # From the oldest: whoever is preempted has no share yet.
        for sequence in tuple(self.running):
            slot, position = sequence.slot, sequence.computed
            if slot < 0 or position < sequence.needed or sequence.sampled == sequence.limit:
                continue
            if not grow(slot, position + 1) and not self._make_room(sequence, position + 1):
                break
            going.append(sequence)
            sequence.computed = position + 1
            sequence.sampled += 1
        works = next_tokens([each.slot for each in going], [each.computed - 1 for each in going])
        return each_made(Share, zip(going, [each.turn for each in going], works, strict=True))

    def _steps(self, runner: BurstRunner, shares: list[Share]) -> int:
        """How many steps a launch of shares that all decode can take: it ends with the first of them to end, so those
        who wait for a slot lose nothing."""
        steps = runner.burst([share.work.slot for share in shares], self.burst_s)
        for sequence, _, _ in shares:
            # One of them is counted already.
            steps = min(steps, sequence.limit - sequence.sampled + 1)
        roomy = steps > 1 and all(self._cache.grow(share.work.slot, share.work.position + steps) for share in shares)
        return steps if roomy else 1

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Room for so many tokens, others preempted if need be; False when it was the youngest itself."""
        while not self._cache.grow(sequence.slot, length):
            youngest = self.running.pop()
            self._free(youngest)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        pooling = sequence.request.pooling is not None
        admission = self._cache.admit(sequence.tokens, reuse=not (sequence.wants_scores or pooling))
        if admission is None:
            return False
        sequence.slot, sequence.sampled = admission.slot, sequence.generated
        sequence.prefill, sequence.computed = len(sequence.tokens), admission.reused
        # Without a token to sample, the prompt's last one has nothing to say.
        sequence.needed = sequence.prefill - (sequence.limit == 0 and not pooling)
        sequence.scores.clear()
        sequence.pooled, sequence.pooled_rows = None, 0
        if not sequence.started:
            sequence.started, sequence.reused = time.perf_counter(), admission.reused
            self.prompt_tokens += len(sequence.tokens)
            self.reused_tokens += admission.reused
        self._runner.bind(sequence.slot, sequence.request, sequence.tokens[len(sequence.request.prompt) :])
        self.running.append(sequence)
        return True

    def _prefill(self, sequence: Sequence, budget: int, *, may_preempt: bool) -> Share | None:
        """A piece of a prompt; None where the cache has no room for it now."""
        first = sequence.computed
        last = min(first + budget, sequence.needed)
        if not self._cache.grow(sequence.slot, last) and not (may_preempt and self._make_room(sequence, last)):
            return None
        pooling = sequence.request.pooling is not None
        sample = last == sequence.prefill and not pooling
        targets = sequence.tokens[first + 1 : last + 1] if sequence.wants_scores else ()
        work = Work(sequence.slot, first, sequence.tokens[first:last], sample, targets, pooling)
        sequence.computed = last
        sequence.sampled += sample
        return Share(sequence, sequence.turn, work)

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.slot, sequence.tokens[: sequence.computed])
        sequence.slot = -1
        sequence.turn += 1


def _slot_of(share: Share) -> int:
    return share.work.slot
