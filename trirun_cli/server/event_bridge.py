"""Events from the engine's thread to the event loop, with one wake-up for many tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from ..engine.request import Event

Receiver = Callable[[Event], None]
# Receivers served at once: their streams write together, and whatever else the loop has to do comes after them.
AT_ONCE = 16


class EventBridge:
    """Carries events from any thread to receivers on an event loop, in order.

    A request's first tokens and its end are delivered at once, together with everything that is waiting. Tokens in
    between may wait until ``interval_s`` seconds after the last delivery: a fast model then sends one chunk per
    interval and stream instead of one per token. Many receivers are served in turns, between which others run.

    Args:
        loop: runs the receivers. interval_s: seconds between deliveries; 0 delivers every event at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.0) -> None:
        self._loop, self._interval = loop, interval_s
        self._items: deque[tuple[Receiver, Event]] = deque()
        # What was taken from there and waits for its turn; the loop's alone.
        self._turns: dict[Receiver, list[Event]] = {}
        self._last = 0.0
        self._scheduled = False
        self._urgent = False
        self._timer: asyncio.TimerHandle | None = None

    def sink_for(self, receiver: Receiver) -> Callable[[Event], None]:
        """The function that the engine calls with each event of a request. It may be called from any thread, returns at
        once and never raises."""
        begun = False

        def sink(event: Event) -> None:
            nonlocal begun
            self._items.append((receiver, event))
            urgent = not begun or event.finish is not None
            begun = True
            # The flags are set before the loop reads them and cleared before it empties the queue, so no event is lost.
            if self._scheduled and (self._urgent or not urgent):
                return
            self._scheduled = True
            self._urgent = self._urgent or urgent
            try:
                self._loop.call_soon_threadsafe(self._deliver if urgent else self._deliver_when_due)
            except RuntimeError:
                # The loop is closed: no receiver is left, and the engine must not fail because of that.
                self._items.clear()

        return sink

    def _deliver_when_due(self) -> None:
        wait = self._last + self._interval - self._loop.time()
        if wait <= 0 or self._urgent:
            self._deliver()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait, self._deliver)

    def _deliver(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last = self._loop.time()
        self._scheduled = self._urgent = False
        while self._items:
            receiver, event = self._items.popleft()
            self._turns.setdefault(receiver, []).append(event)
        for receiver in list(islice(self._turns, AT_ONCE)):
            for event in self._turns.pop(receiver):
                receiver(event)
        if self._turns:
            self._scheduled = self._urgent = True
            self._loop.call_soon(self._deliver)
