"""Server-sent events whose producer is stopped whenever the answer ends, however it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def dumps(document: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def event(document: Any) -> bytes:
    """One event."""
    return b"data: %b\n\n" % dumps(document)


class EventStream(StreamingResponse):
    """A stream of events.

    Args:
        events: encoded events. close: is called once at the end, also when the client went away before the first event
            was asked for, which a ``finally`` in the generator would miss.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # Proxies that collect answers before passing them on are told not to.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
