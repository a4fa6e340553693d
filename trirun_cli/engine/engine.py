"""The loop that runs requests: schedule, launch, collect, deliver."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..errors import InputError
from .request import EngineStats, EngineStopped, Event, FinishReason, QueueFull, Request, Sink
from .runner import BurstRunner, Outcome, Pending, Runner
from .sampling import Token
from .scheduler import SHARED_BURST_S, Scheduler, Share, Step
from .sequence import Sequence

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger("trirun")


class Engine:
    """Runs requests on a runner, by :meth:`step` or on a thread of its own.

    Args:
        runner: the model. max_waiting: requests that may wait beyond those that have a slot; None is no limit.
    """

    def __init__(self, runner: Runner, *, max_waiting: int | None = None) -> None:
        if runner.max_rows < runner.slots:
            raise ValueError(f"{runner.name}: {runner.max_rows} rows per step for {runner.slots} slots")
        self._runner, self._scheduler = runner, Scheduler(runner)
        self._burst = runner if isinstance(runner, BurstRunner) else None
        self._most = None if max_waiting is None else runner.slots + max_waiting
        # Guards the two fields that other threads touch: every live request by its id, and those that come or go.
        self._changed = threading.Condition()
        self._live: dict[str, Sequence] = {}
        self._inbox: deque[tuple[Sequence, bool]] = deque()
        self._flying: tuple[list[Share], Pending] | None = None
        self._thread: threading.Thread | None = None
        self._open = True
        self._failure: BaseException | None = None
        self._generated_tokens = self._steps = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self.name, self.why_slower, self.slots = runner.name, runner.why_slower, runner.slots
        self.context, self.vocab_size, self.has_states = runner.context, runner.vocab_size, runner.has_states
        runner.prepare()

    @property
    def description(self) -> str:
        """What runs the model, and why nothing faster does, for people."""
        return f"{self.name} ({self.why_slower})" if self.why_slower else self.name

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._open

    @property
    def stats(self) -> EngineStats:
        """A snapshot; of any thread."""
        running = len(self._scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(len(self._live) - running, 0),
            cache_usage=self._runner.cache.usage,
            prompt_tokens=self._scheduler.prompt_tokens,
            reused_tokens=self._scheduler.reused_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            preemptions=self._scheduler.preemptions,
            finished=dict(self._finished),
        )

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request; of any thread.

        Args:
            sink: called on the engine's thread with each of the request's events, soon to return. One that raises
                ends its request and no other.

        Raises:
            InputError: see :meth:`check`.
            QueueFull: too many requests wait. EngineStopped: it takes none any more. ValueError: the id is taken.
        """
        self.check(request)
        sequence = Sequence.of(request, sink, self.context)
        with self._changed:
            if not self._open:
                raise EngineStopped(f"the engine has stopped: {self._failure or 'closed'}")
            if request.id in self._live:
                raise ValueError(f"request {request.id!r} is in the engine already")
            if self._most is not None and len(self._live) >= self._most:
                raise QueueFull(f"{len(self._live)} requests are running or waiting; that is the limit")
            self._live[request.id] = sequence
            self._inbox.append((sequence, True))
            self._changed.notify()

    def check(self, request: Request) -> None:
        """Whether a prompt fits the model.

        Raises:
            InputError: it is empty, longer than the context, holds an id that the model does not have, or wants hidden
                states of a runner that gives none.
        """
        prompt = request.prompt
        if not prompt:
            raise InputError("the prompt is empty")
        if request.pooling and not self.has_states:
            raise InputError(f"{self.name} gives no hidden states, of which embeddings are made")
        if len(prompt) > self.context:
            raise InputError(f"the prompt has {len(prompt)} tokens, the context is {self.context} (--ctx)")
        for ids, what in ((prompt, "token id"), (request.params.logit_bias, "logit_bias: token id")):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                bad = next(id for id in ids if not 0 <= id < self.vocab_size)
                raise InputError(f"{what} {bad} is outside the model's vocabulary of {self.vocab_size}")

    def abort(self, request_id: str) -> None:
        """End a request before the next step; of any thread. Nothing happens where there is none of that id."""
        with self._changed:
            if (sequence := self._live.get(request_id)) is not None:
                self._inbox.append((sequence, False))
                self._changed.notify()

    def step(self) -> bool:
        """One step: launch the next, collect this one (the one before it, where the runner looks ahead), deliver.

        Returns:
            whether there is anything left to do.

        Raises:
            Whatever the runner raised. Every request has ended with ERROR then, and the engine takes no more.
        """
        try:
            if self._inbox:
                self._take_inbox()
            step, launched = self._scheduler.schedule(), None
            if step.shares:
                launched = step.shares, self._launch(step)
                self._scheduler.launched(step.shares)
                self._steps += 1
            elif self._flying is None and self._live and not self._inbox:
                raise RuntimeError(f"{self.name}: the cache has no room for any request")
            if self._runner.lookahead:
                launched, self._flying = self._flying, launched
            if launched is not None:
                shares, pending = launched
                for (sequence, turn, _), outcome in zip(shares, pending.collect(), strict=True):
                    if turn == sequence.turn:
                        self._deliver(sequence, outcome)
        except BaseException as error:
            self._fail(error)
            raise
        return bool(self._live)

    def start(self) -> None:
        """Run steps on a thread, whenever there is something to do, until :meth:`close`."""
        self._scheduler.burst_s = SHARED_BURST_S
        self._thread = threading.Thread(target=self._loop, name="trirun-engine", daemon=True)
        self._thread.start()

    def close(self, drain_s: float = 0) -> None:
        """Take no more requests, give those inside ``drain_s`` seconds to end, abort the rest, free the model."""
        until = time.perf_counter() + drain_s
        with self._changed:
            self._open = False
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: not self._live, timeout=drain_s)
        try:
            while self._thread is None and self._live and time.perf_counter() < until:
                self.step()
            with self._changed:
                self._inbox.extend((sequence, False) for sequence in self._live.values())
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
            self._take_inbox()
        finally:
            self._runner.close()

    def generate(self, requests: Iterable[Request]) -> Generator[Event, None, None]:
        """Run requests and give their events as they come; abort() what should not go on, between two of them.

        Requests are taken from the iterable as there is room. Steps run on the caller's thread unless the engine has
        its own. Leaving the iteration aborts what it had submitted.

        Raises:
            What :meth:`submit` and :meth:`step` raise.
        """
        events: SimpleQueue[Event] = SimpleQueue()
        source, more = iter(requests), True
        mine: set[str] = set()
        most = self.slots * 2 if self._most is None else min(self.slots * 2, self._most)
        try:
            while True:
                while more and len(mine) < most:
                    request = next(source, None)
                    if more := request is not None:
                        self.submit(request, events.put)
                        mine.add(request.id)
                if not mine:
                    return
                while self._thread is None and events.empty():
                    self.step()
                event = events.get()
                if event.finish is not None:
                    mine.remove(event.request_id)
                yield event
        finally:
            for request_id in mine:
                self.abort(request_id)
            if self._thread is None:
                self._take_inbox()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._live or not self._open)
                if not self._live:
                    return
            try:
                while self.step():
                    pass
            except Exception:
                logger.exception("the engine has stopped")
                return

    def _launch(self, step: Step) -> Pending:
        work = [share.work for share in step.shares]
        if step.steps > 1 and self._burst is not None:
            return self._burst.launch_burst(work, step.steps)
        return self._runner.launch(work)

    def _take_inbox(self) -> None:
        while self._inbox:
            sequence, comes = self._inbox.popleft()
            if self._live.get(sequence.request.id) is not sequence:
                continue
            if not comes:
                self._end(sequence, FinishReason.ABORT)
            elif sequence.limit or sequence.request.pooling or (sequence.wants_scores and len(sequence.tokens) > 1):
                self._scheduler.add(sequence)
            else:
                self._end(sequence, FinishReason.LENGTH, scores=sequence.take_scores(()))

    def _deliver(self, sequence: Sequence, outcome: Outcome) -> None:
        token, prompt, more, states = outcome
        if states is not None:
            if (embedding := sequence.pool(states)) is not None:
                self._end(sequence, FinishReason.STOP, embedding=embedding)
            return
        request, scores = sequence.request, None
        if sequence.wants_scores:
            scores = sequence.take_scores(prompt)
        if token is None:
            if scores is not None and sequence.limit == 0:
                self._end(sequence, FinishReason.LENGTH, scores=scores)
            elif scores is not None:
                self._tell(sequence, Event(request.id, prompt_logprobs=scores))
            return
        if first := not sequence.first_token:
            sequence.first_token = time.perf_counter()
        tokens, reason = sequence.take((token, *more))
        self._generated_tokens += len(tokens)
        if reason is None:
            usage = sequence.usage() if first else None
            self._tell(sequence, Event(request.id, tokens, None, None, scores, usage))
        else:
            self._end(sequence, reason, tokens, scores)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: tuple[Token, ...] = (),
        scores: tuple[Token, ...] | None = None,
        embedding: np.ndarray | None = None,
    ) -> None:
        self._scheduler.remove(sequence)
        with self._changed:
            del self._live[sequence.request.id]
            self._changed.notify_all()
        self._finished[reason] += 1
        error = sequence.no_token if reason is FinishReason.ERROR else None
        event = Event(sequence.request.id, tokens, reason, error, scores, sequence.usage(), embedding)
        self._tell(sequence, event)

    def _tell(self, sequence: Sequence, event: Event) -> None:
        try:
            sequence.sink(event)
        except Exception:
            logger.exception("request %s ends: its sink failed", event.request_id)
            if event.finish is None:
                self.abort(event.request_id)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._open, self._failure = False, error
            lost, self._live, self._flying = list(self._live.values()), {}, None
            self._inbox.clear()
            self._scheduler.clear()
            self._changed.notify_all()
        message = f"{type(error).__name__}: {error}"
        for sequence in lost:
            self._finished[FinishReason.ERROR] += 1
            event = Event(sequence.request.id, finish=FinishReason.ERROR, error=message, usage=sequence.usage())
            self._tell(sequence, event)
