"""From the engine's thread to the event loop: one wake-up for many tokens, not one per token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..engine.request import Event

Receiver = Callable[[Event], None]


class Outbox:
    """Carries events to receivers on an event loop, in order.

    A request's first tokens and its end are delivered at once, and with them whatever else is there; tokens in between
    may wait until ``interval_s`` have passed since the last delivery. A model that writes faster than anyone reads then
    costs a chunk per interval and stream, not per token.

    Args:
        loop: where receivers run. interval_s: 0 delivers everything at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.0) -> None:
        self._loop, self._interval = loop, interval_s
        self._items: deque[tuple[Receiver, Event]] = deque()
        self._last = 0.0
        self._scheduled = False
        self._hurry = False
        self._timer: asyncio.TimerHandle | None = None

    def address(self, receiver: Receiver) -> Callable[[Event], None]:
        """A sink for the engine: may be called from any thread, returns at once, never raises."""
        begun = False

        def sink(event: Event) -> None:
            nonlocal begun
            self._items.append((receiver, event))
            urgent = not begun or event.finish is not None
            begun = True
            # Both flags are set before the loop looks and cleared before it empties the queue: nothing is left behind.
            if self._scheduled and (self._hurry or not urgent):
                return
            self._scheduled = True
            self._hurry = self._hurry or urgent
            try:
                self._loop.call_soon_threadsafe(self._deliver if urgent else self._consider)
            except RuntimeError:
                # The loop is closed: nobody is left to read, and the engine must not suffer for it.
                self._items.clear()

        return sink

    def _consider(self) -> None:
        wait = self._last + self._interval - self._loop.time()
        if wait <= 0 or self._hurry:
            self._deliver()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait, self._deliver)

    def _deliver(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last = self._loop.time()
        self._scheduled = self._hurry = False
        while self._items:
            receiver, event = self._items.popleft()
            receiver(event)
