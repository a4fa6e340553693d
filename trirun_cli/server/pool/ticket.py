"""A request that waits for a model."""

from __future__ import annotations

import asyncio

from fastapi import Request

from ..answer import disconnected
from ..errors import ApiError
from .entry import Entry


class Ticket:
    """A place in the queue for a model. To be made and used on the event loop."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def admit(self) -> None:
        """The model is there: hold it for the request."""
        if not self._ready.done():
            self.entry.held += 1
            self._ready.set_result(None)

    def refuse(self, error: ApiError) -> None:
        """There will be no model."""
        if not self._ready.done():
            self._ready.set_exception(error)

    async def wait(self, request: Request) -> None:
        """Wait for the model, which is held then, or is not where this raises.

        Raises:
            ApiError: that of :meth:`refuse`; 499, the client has left.
        """
        # ASGI reports a disconnect only to a pending receive().
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((gone, self._ready), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                raise ApiError(499, "the client has left")
            self._ready.result()
        except BaseException:
            # It may have been admitted in the moment that it was cancelled.
            if self._ready.done() and self._ready.exception() is None:
                self.entry.held -= 1
            self._ready.cancel()
            raise
        finally:
            gone.cancel()
