"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ...text.tool_calls import parser_for
from ..answer import answer
from ..errors import ANTHROPIC
from ..pool.pool import Pool
from .anthropic_bodies import CountBody, MessagesBody
from .anthropic_replies import MessageReply


def add(app: FastAPI, pool: Pool) -> None:
    """Add the routes to an application."""

    @app.post(ANTHROPIC, response_model=None)
    async def messages(request: Request, body: MessagesBody) -> Response:
        """Answer a conversation, in the form of Anthropic's API."""
        arrived = time.perf_counter()
        chat = body.chat_body()
        async with pool.use(body.model, request) as service:
            group = await service.chat(chat, arrived)
            tokenizer = service.model.tokenizer
            reply = MessageReply(
                body.model or service.names[0],
                tokenizer,
                logprobs=False,
                token_ids=False,
                parser=partial(parser_for, tokenizer.tool_template or "") if chat.offers_tools else None,
                one_call=chat.parallel_tool_calls is False,
                reasoning=service.reasoning_parser(group),
            )
            return await answer(request, service, group, reply, stream=bool(body.stream))

    @app.post(f"{ANTHROPIC}/count_tokens")
    async def count_tokens(request: Request, body: CountBody) -> dict:
        """How many tokens a conversation has."""
        chat = body.chat_body()
        async with pool.use(body.model, request) as service:
            return {"input_tokens": len(await service.model.tokenizer.render(chat.messages, chat))}
