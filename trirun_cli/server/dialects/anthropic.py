"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..errors import ANTHROPIC, STREAMED, AnthropicErrorDocument, refusals
from ..pool.pool import Pool
from .anthropic_bodies import CountBody, MessagesBody
from .anthropic_replies import MessageReply
from .chat import answer_chat


def add(app: FastAPI, pool: Pool) -> None:
    """Add the routes to an application."""

    refused = refusals(AnthropicErrorDocument)

    @app.post(ANTHROPIC, response_model=None, responses=STREAMED | refused)
    async def messages(request: Request, body: MessagesBody) -> Response:
        """Answer a conversation, in the form of Anthropic's API."""
        arrived = time.perf_counter()
        chat, stream = body.chat_body(), bool(body.stream)
        return await answer_chat(request, pool, body.model, chat, arrived, MessageReply, stream=stream)

    @app.post(f"{ANTHROPIC}/count_tokens", responses=refused)
    async def count_tokens(request: Request, body: CountBody) -> dict:
        """How many tokens a conversation has."""
        chat = body.chat_body()
        async with pool.use(body.model, request) as service:
            return {"input_tokens": len(await service.model.tokenizer.render(chat.messages, chat))}
