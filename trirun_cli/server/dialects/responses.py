"""OpenAI's Responses API: POST /v1/responses. Nothing is stored, so there is nothing to fetch, continue or delete."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..errors import STREAMED, ApiError
from ..pool.pool import Pool
from .chat import answer_chat
from .responses_bodies import ResponsesBody, in_its_names
from .responses_replies import ResponseReply

_PATH = "/v1/responses"


def add(app: FastAPI, pool: Pool) -> None:
    """Add the routes to an application."""

    @app.post(_PATH, response_model=None, responses=STREAMED)
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        arrived = time.perf_counter()
        try:
            chat, stream = body.chat_body(), bool(body.stream)
            return await answer_chat(request, pool, body.model, chat, arrived, ResponseReply, stream=stream, body=body)
        except ApiError as error:
            raise in_its_names(error) from error

    @app.api_route(_PATH + "/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> None:
        """Responses are not stored."""
        message = f"there is no response {response_id[:100]!r}: this server stores none"
        raise ApiError(404, message, param="response_id", code="response_not_found")
