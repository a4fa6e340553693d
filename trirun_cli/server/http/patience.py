"""Connections that take too long: who sends no request, and who does not read the answer."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Seconds from a connection, or the first byte of a further request, to the end of the request's headers.
HEADERS_S = 30.0
# Seconds in which a reader must take what waits for it, some tens of KiB: a slow modem's.
READER_S = 60.0


class Patient(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol, which waits for headers and for readers only so long.

    Attributes:
        headers_s, reader_s: seconds of each.
    """

    headers_s, reader_s = HEADERS_S, READER_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sender: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A cycle is a request whose headers are there.
        if self.cycle is None or self.cycle.response_complete:
            self._await_headers()
        elif self._sender is not None:
            self._sender.cancel()
            self._sender = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._sender, self._reader):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self.loop.call_later(self.reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What is left is too little to pause for; a connection that closes would wait for its reader for ever.
        if self._reader is None and self.transport.get_write_buffer_size():
            self._reader = self.loop.call_later(self.reader_s, self._drop_unread)

    def _drop_unread(self) -> None:
        self._reader = None
        if self.cycle.response_complete and self.transport.get_write_buffer_size():
            self.transport.abort()

    def _await_headers(self) -> None:
        if self._sender is None:
            self._sender = self.loop.call_later(self.headers_s, self._give_up)

    def _give_up(self) -> None:
        self._sender = None
        # Between two requests a client may wait for as long as connections are kept.
        if self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()
