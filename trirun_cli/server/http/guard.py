"""Middleware around the application: request ids, the API key, the size limit, unexpected errors, and the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from ..operations.logs import log_request
from ..operations.tracing import Tracing, describe
from .json_weight import is_too_heavy

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("trirun.server")

# Health checks and metrics need no key, and the page to chat with asks for it.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics"})
# Ids are repeated in headers and logs, so only printable ASCII is taken.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# This much of a body that is too large is read and dropped: a client that reads only after it has written then gets the
# response and not a reset connection.
_DROPPED_BYTES = 64 * 2**20


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
        api_key: the Bearer token, or x-api-key, required by every path but :data:`OPEN_PATHS`; None requires none.
        max_body_bytes: a larger body returns 413 before it is parsed.
        tracing: makes the spans of requests. body_s: a body that takes more seconds than this returns 408.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None = None,
        max_body_bytes: int,
        tracing: Tracing | None = None,
        body_s: float = 60.0,
    ) -> None:
        self._app, self._max_body, self._body_s = app, max_body_bytes, body_s
        self._tracing = tracing or Tracing()
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        if scope["path"] in OPEN_PATHS:
            return await self._run(scope, headers, receive, send, None)
        with self._tracing.span(scope) as span:
            await self._run(scope, headers, receive, send, span)

    async def _run(self, scope: Scope, headers: Headers, receive: Receive, send: Send, span: Span | None) -> None:
        request_id = scope["state"]["request_id"]
        started, status, began = False, 499, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._admit(scope, headers, receive, send_with_id)
        except asyncio.CancelledError:
            if not started:
                error = ApiError(503, "the server is shutting down", code="shutting_down")
                await error.response(scope["path"])(scope, receive, send_with_id)
            raise
        except Exception:
            log.exception("request %s failed", request_id)
            if not started:
                error = ApiError(500, "internal error; the server's log has more", code="internal_error")
                await error.response(scope["path"])(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            log_request(scope, status, seconds)
            if span is not None:
                describe(span, scope, status, seconds)

    async def _admit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Pass a request with its whole body to the application, or refuse it."""
        try:
            self._check_key(scope["path"], headers)
            async with asyncio.timeout(self._body_s):
                body = await self._read(headers, receive)
            if body is not None and is_too_heavy(body):
                raise ApiError(413, "the body has too many values: a few hundred thousand are taken")
        except TimeoutError:
            message = f"the body did not come within {self._body_s:g} s"
            refusal = ApiError(408, message, headers={"Connection": "close"})
            return await refusal.response(scope["path"])(scope, receive, send)
        except ApiError as refusal:
            return await refusal.response(scope["path"])(scope, receive, send)
        if body is None:
            return None
        unread = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_body() -> Message:
            return next(unread, None) or await receive()

        await self._app(scope, receive_body, send)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        given = headers.get("authorization", "").encode("utf-8", "surrogateescape")
        # Anthropic's clients send the key by itself.
        if not given and (bare := headers.get("x-api-key")) is not None:
            given = b"Bearer " + bare.encode("utf-8", "surrogateescape")
        # The name of the scheme is case-insensitive; the key is not, and is compared in constant time.
        scheme, _, token = given.partition(b" ")
        if not hmac.compare_digest(scheme.title() + b" " + token.strip(), self._key):
            message = "wrong API key" if given else "an API key is required: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None when the client disconnects before its end."""
        pieces: list[bytes] = []
        size = 0
        declared = int(headers.get("content-length", "0"))
        if declared > self._max_body and (declared > _DROPPED_BYTES or "expect" in headers):
            raise self._too_large()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size <= self._max_body:
                pieces.append(piece)
            else:
                pieces.clear()
            if not message.get("more_body", False):
                break
            if size > _DROPPED_BYTES:
                break
        if size > self._max_body:
            raise self._too_large()
        return b"".join(pieces)

    def _too_large(self) -> ApiError:
        # The rest of the body would be read as the next request, so the connection is closed.
        message = f"the body is larger than {self._max_body / 2**20:g} MiB"
        return ApiError(413, message, headers={"Connection": "close"})
