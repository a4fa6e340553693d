"""One HTTP request in the engine: its choices, from the engine's tokens to text that is certain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..engine.request import Event, FinishReason, QueueFull, Request, Usage
from ..engine.sampling import Token
from ..text.detokenizer import Detokenizer
from .errors import ApiError

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .event_bridge import Outbox
    from .metrics import Metrics


log = logging.getLogger("trirun.server")


@dataclass(slots=True)
class Delta:
    """What became certain of one choice.

    Attributes:
        text: never a part of a character, never a part of a stop string. tokens: those it was made of, or will be.
        scores: of the prompt's tokens, where they were asked for, in the first delta.
        finish: "stop" or "length" in the last one.
    """

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    scores: Sequence[Token] = ()
    finish: str | None = None


class Choice:
    """One continuation of one prompt.

    Attributes:
        finish: "stop" or "length" once it ended well. generated: tokens so far.
        usage: what the engine said last, at the first tokens or at its end.
        stopped: a stop string was met while the engine is still at work on it.
    """

    def __init__(self, index: int, request: Request, stream: Detokenizer) -> None:
        self.index, self.request = index, request
        self.usage: Usage | None = None
        self.generated = 0
        self.finish: str | None = None
        self.stopped = False
        self._stream = stream
        self._delta = Delta(index)

    def receive(self, event: Event) -> None:
        """Take in news from the engine."""
        if self.finish is not None:
            return
        delta = self._delta
        self.usage = event.usage or self.usage
        if event.prompt_logprobs is not None:
            delta.scores = event.prompt_logprobs
        ended = event.finish in (FinishReason.STOP, FinishReason.LENGTH)
        piece, count = self._stream.take([token.id for token in event.tokens], last=ended)
        self.generated += count
        delta.tokens += event.tokens[:count]
        delta.text += piece
        # What was held back until the end may hold a stop string after all.
        if self._stream.stopped:
            self.finish, self.stopped = "stop", event.finish is None
        elif ended:
            self.finish = str(event.finish)
        delta.finish = self.finish

    def take(self) -> Delta:
        """What is new since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        return delta


class Job:
    """The choices of one HTTP request.

    Args:
        arrived: when the request came, of time.perf_counter.
    """

    def __init__(self, engine: Engine, outbox: Outbox, metrics: Metrics, arrived: float) -> None:
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self._engine, self._outbox, self._metrics, self._arrived = engine, outbox, metrics, arrived
        self._changed = asyncio.Event()
        self._news: dict[int, Choice] = {}
        self._open: dict[str, Choice] = {}
        self._times: dict[str, float] = {}

    def start(self, requests: Sequence[Request], stream: Callable[[Request], Detokenizer]) -> None:
        """Submit everything, or nothing.

        Raises:
            ApiError: 429 when the engine's queue is full.
        """
        try:
            for index, request in enumerate(requests):
                choice = Choice(index, request, stream(request))
                self._engine.submit(request, self._outbox.address(partial(self._receive, choice)))
                self.choices.append(choice)
                self._open[request.id] = choice
        except QueueFull as error:
            self.close()
            message = f"the server is busy: {error}"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from error
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[Delta]:
        """What becomes certain, as it does; everything that is there at a time comes in one delta per choice.

        Raises:
            ApiError: the engine failed or is stopping.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            news, self._news = self._news, {}
            for choice in news.values():
                yield choice.take()
            # While the consumer was busy with these, more may have come.
            if self._news:
                continue
            if self.error is not None:
                raise self.error
            if not self._open:
                return

    async def whole(self) -> list[Delta]:
        """Every choice when all have ended, in order.

        Raises:
            ApiError: the engine failed or is stopping.
        """
        while self._open and self.error is None:
            await self._changed.wait()
            self._changed.clear()
        if self.error is not None:
            raise self.error
        return [choice.take() for choice in self.choices]

    def abort(self, error: ApiError) -> None:
        """End it from outside; its client gets ``error``."""
        if self._open:
            self._fail(error)

    def close(self) -> None:
        """Free what is still at work. To be called in any case; calling it again does nothing."""
        for request_id in self._open:
            self._engine.abort(request_id)
            self._metrics.ended("abort", time.perf_counter() - self._arrived)
        self._open.clear()

    def _fail(self, error: ApiError) -> None:
        self.close()
        self.error = error
        self._changed.set()

    def _receive(self, choice: Choice, event: Event) -> None:
        if event.request_id not in self._open:
            return
        try:
            self._take(choice, event)
        except Exception:
            # On the event loop nobody else would hear of it, and the client would wait for ever.
            log.exception("a request ends: its tokens could not be made text")
            self._fail(ApiError(500, "internal error; the server's log has more", code="internal_error"))

    def _take(self, choice: Choice, event: Event) -> None:
        request_id = event.request_id
        now = time.perf_counter()
        if event.tokens:
            last = self._times.get(request_id)
            self._metrics.tokens(len(event.tokens), now - (last or self._arrived), first=last is None)
            self._times[request_id] = now
        choice.receive(event)
        if event.finish is FinishReason.ERROR:
            self.error = ApiError(500, f"the engine failed: {event.error}", code="engine_error")
        elif event.finish is FinishReason.ABORT:
            self.error = ApiError(503, "the server is shutting down", code="shutting_down")
        if choice.stopped:
            self._engine.abort(request_id)
        if event.finish is not None or choice.finish is not None:
            del self._open[request_id]
            self._metrics.ended(choice.finish or str(event.finish), now - self._arrived, choice)
        self._news[choice.index] = choice
        self._changed.set()
