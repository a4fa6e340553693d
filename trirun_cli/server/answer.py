"""How a group of requests becomes the response of an HTTP request, whole or streamed."""

from __future__ import annotations

import asyncio

from fastapi import Request
from fastapi.responses import Response

from .http import sse
from .replies import Reply
from .request_group import RequestGroup
from .service import Service


async def answer(request: Request, service: Service, group: RequestGroup, reply: Reply, *, stream: bool) -> Response:
    """The response; a client that disconnects cancels what still runs."""
    request.state.group, request.state.model = group, service.names[0]
    if stream:
        return sse.EventStream(reply.events(group), lambda: service.forget(group))
    # ASGI reports a disconnect only to a pending receive().
    gone = asyncio.ensure_future(disconnected(request))
    done = asyncio.ensure_future(group.whole())
    try:
        await asyncio.wait((gone, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            return Response(status_code=499)
        deltas = done.result()
        tokens = sum(len(delta.tokens) + len(delta.scores) for delta in deltas)
        body = await sse.dumps_of(lambda: reply.document(group, deltas), tokens)
        return Response(body, media_type="application/json")
    finally:
        gone.cancel()
        done.cancel()
        service.forget(group)


async def disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
