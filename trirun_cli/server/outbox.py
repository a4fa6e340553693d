"""From the engine's thread to the event loop: one wake-up for everything that a step brings, not one per token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..runtime.engine.request import Event

Receiver = Callable[[Event], None]


class Outbox:
    """Carries events to receivers on an event loop, in order.

    Args:
        loop: where receivers run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Receiver, Event]] = deque()
        self._scheduled = False

    def address(self, receiver: Receiver) -> Callable[[Event], None]:
        """A sink for the engine: may be called from any thread, returns at once, never raises."""

        def sink(event: Event) -> None:
            self._items.append((receiver, event))
            # Set before the loop looks and cleared before it empties the queue: an event is never left behind.
            if not self._scheduled:
                self._scheduled = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    # The loop is closed: nobody is left to read, and the engine must not suffer for it.
                    self._items.clear()

        return sink

    def _deliver(self) -> None:
        self._scheduled = False
        while self._items:
            receiver, event = self._items.popleft()
            receiver(event)
