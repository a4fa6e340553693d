"""Server-sent events whose producer is closed when the response ends, also by a disconnect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..thread import on_thread

_FEW_TOKENS = 500
DONE = b"data: [DONE]\n\n"


def dumps(document: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def dumps_of(make: Callable[[], Any], tokens: int) -> bytes:
    """:func:`dumps` of what ``make`` returns, on a thread where it is about many tokens: each may have some twenty
    log-probabilities. The encoder there is Python's own, as the fast one keeps the interpreter's lock to the end."""
    if tokens <= _FEW_TOKENS:
        return dumps(make())

    def slowly() -> bytes:
        encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
        return "".join(encoder.iterencode(make())).encode()

    return await on_thread(slowly, "trirun-encode")


def event(document: Any) -> bytes:
    """One server-sent event with a JSON document as its data."""
    return event_of(dumps(document))


def event_of(data: bytes) -> bytes:
    """One server-sent event with that data."""
    return b"data: %b\n\n" % data


class EventStream(StreamingResponse):
    """A response that streams events.

    Args:
        events: encoded. close: called once at the end, also when the client disconnects before the first event, where a
            ``finally`` in the generator would not run.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        # Ask proxies not to buffer the stream.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
