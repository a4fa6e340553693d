"""One HTTP request in the engine: a group of choices, and the text that is certain of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..engine.request import Event, FinishReason, QueueFull, Request, Usage
from ..engine.sampling import Token
from ..text.detokenizer import Detokenizer
from .errors import ApiError

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .event_bridge import EventBridge
    from .operations.metrics import ModelMetrics


log = logging.getLogger("trirun.server")


@dataclass(slots=True)
class Delta:
    """What is new of one choice.

    Attributes:
        index: of the choice. text: whole characters, no part of a stop string. reasoning: what replies move out of it.
        tokens: new ones; their text may come in a later delta.
        scores: of the prompt's tokens, in the first delta, where the request asked for them.
        finish: "stop" or "length" in the last delta, None before.
    """

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    scores: Sequence[Token] = ()
    finish: str | None = None
    reasoning: str = ""


class Choice:
    """One continuation of one prompt.

    Args:
        index: in the response. request: in the engine. detokenizer: turns its tokens into text.

    Attributes:
        finish: "stop" or "length" once it has ended without an error. generated: tokens so far.
        usage: the engine's latest, from the first tokens or the end.
        stopped: a stop string was found while the engine still generates.
    """

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer) -> None:
        self.index, self.request = index, request
        self.usage: Usage | None = None
        self.generated = 0
        self.finish: str | None = None
        self.stopped = False
        self._detokenizer = detokenizer
        self._delta = Delta(index)

    def receive(self, event: Event) -> None:
        """Handle an event of the engine."""
        if self.finish is not None:
            return
        delta = self._delta
        self.usage = event.usage or self.usage
        if event.prompt_logprobs is not None:
            delta.scores = event.prompt_logprobs
        ended = event.finish in (FinishReason.STOP, FinishReason.LENGTH)
        piece, count = self._detokenizer.take([token.id for token in event.tokens], last=ended)
        self.generated += count
        delta.tokens += event.tokens[:count]
        delta.text += piece
        # The text held back until the end may contain a stop string.
        if self._detokenizer.stopped:
            self.finish, self.stopped = "stop", event.finish is None
        elif ended:
            self.finish = str(event.finish)
        delta.finish = self.finish

    @property
    def matched(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._detokenizer.matched

    def take(self) -> Delta:
        """The delta since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        return delta


class TokenCounts(NamedTuple):
    """Tokens of a group: of its prompts, of those the ones found in the cache, and the generated ones. A prompt counts
    once, however many choices continue it."""

    prompt: int
    cached: int
    generated: int


class RequestGroup:
    """The choices of one HTTP request, which start, fail and end together.

    Args:
        engine: runs the requests. bridge: carries their events to this event loop. metrics: of the server.
        arrived: when the HTTP request came, by time.perf_counter.

    Attributes:
        choices: in the order of the response. error: what ended the group early, or None.
        first_token_s: seconds from the arrival to the first token of any choice; None before.
    """

    def __init__(self, engine: Engine, bridge: EventBridge, metrics: ModelMetrics, arrived: float) -> None:
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self.first_token_s: float | None = None
        self._engine, self._bridge, self._metrics, self._arrived = engine, bridge, metrics, arrived
        self._changed = asyncio.Event()
        self._updated: dict[int, Choice] = {}
        self._open: dict[str, Choice] = {}
        self._times: dict[str, float] = {}

    def start(self, requests: Sequence[Request], detokenizer: Callable[[Request], Detokenizer]) -> None:
        """Submit every request, or none.

        Args:
            requests: one for each choice. detokenizer: makes the detokenizer of a request.

        Raises:
            ApiError: 429, the engine's queue is full. TrirunError: the engine refuses a request.
        """
        try:
            for index, request in enumerate(requests):
                choice = Choice(index, request, detokenizer(request))
                self._engine.submit(request, self._bridge.sink_for(partial(self._receive, choice)))
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
        """Deltas as they come, until every choice has ended; what is there at a time comes in one delta per choice.

        Raises:
            ApiError: the engine failed or is stopping.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            updated, self._updated = self._updated, {}
            for choice in updated.values():
                yield choice.take()
            # More may have come while the consumer handled these.
            if self._updated:
                continue
            if self.error is not None:
                raise self.error
            if not self._open:
                return

    async def whole(self) -> list[Delta]:
        """Wait until every choice has ended; one delta for each, in order.

        Raises:
            ApiError: the engine failed or is stopping.
        """
        while self._open and self.error is None:
            await self._changed.wait()
            self._changed.clear()
        if self.error is not None:
            raise self.error
        return [choice.take() for choice in self.choices]

    @property
    def token_counts(self) -> TokenCounts:
        """The tokens so far."""
        prompts = {id(choice.request.prompt): choice for choice in reversed(self.choices)}.values()
        return TokenCounts(
            prompt=sum(len(choice.request.prompt) for choice in prompts),
            cached=sum(choice.usage.reused_tokens for choice in prompts if choice.usage is not None),
            generated=sum(choice.generated for choice in self.choices),
        )

    @property
    def finishes(self) -> list[str]:
        """Why its choices have ended, each reason once; "abort" of those that have not by themselves."""
        return sorted({choice.finish or "abort" for choice in self.choices})

    def abort(self, error: ApiError) -> None:
        """Cancel every choice that still runs; the client gets ``error``."""
        if self._open:
            self._fail(error)

    def close(self) -> None:
        """Cancel what still runs in the engine. To be called at the end in any case; calling it again does nothing."""
        for request_id in self._open:
            self._engine.abort(request_id)
            self._metrics.ended("abort")
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
            # The event loop would only log it, and the client would wait for ever.
            log.exception("a request failed: its tokens could not be decoded")
            self._fail(ApiError(500, "internal error; the server's log has more", code="internal_error"))

    def _take(self, choice: Choice, event: Event) -> None:
        request_id = event.request_id
        now = time.perf_counter()
        if event.tokens:
            last = self._times.get(request_id)
            if self.first_token_s is None:
                self.first_token_s = now - self._arrived
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
            self._metrics.ended(choice.finish or str(event.finish))
            self._metrics.completed(
                now - self._arrived,
                prompt_tokens=len(choice.request.prompt),
                generated_tokens=choice.generated,
                queued_s=None if choice.usage is None else choice.usage.queued_s,
            )
        self._updated[choice.index] = choice
        self._changed.set()
