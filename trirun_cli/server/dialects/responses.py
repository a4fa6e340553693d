"""OpenAI's Responses API: POST /v1/responses. Nothing is stored, so there is nothing to fetch, continue or delete."""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...text.tool_calls import parser_for
from ..answer import answer
from ..errors import ApiError
from ..pool.pool import Pool
from .responses_bodies import ResponsesBody, in_its_names
from .responses_replies import ResponseReply

_PATH = "/v1/responses"


def add(app: FastAPI, pool: Pool) -> None:
    """Add the routes to an application."""

    @app.post(_PATH, response_model=None)
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        arrived = time.perf_counter()
        try:
            chat = body.chat_body()
            async with pool.use(body.model, request) as service:
                group = await service.chat(chat, arrived)
                tokenizer = service.model.tokenizer
                reply = ResponseReply(
                    body.model or service.names[0],
                    tokenizer,
                    logprobs=False,
                    token_ids=False,
                    body=body,
                    parser=partial(parser_for, tokenizer.tool_template or "") if chat.offers_tools else None,
                    one_call=chat.parallel_tool_calls is False,
                    reasoning=service.reasoning_parser(group),
                )
                return await answer(request, service, group, reply, stream=bool(body.stream))
        except ApiError as error:
            raise in_its_names(error) from error

    @app.api_route(_PATH + "/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> None:
        """Responses are not stored."""
        message = f"there is no response {response_id[:100]!r}: this server stores none"
        raise ApiError(404, message, param="response_id", code="response_not_found")
