"""What the routes of all dialects do with a conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ...text.tool_calls import parser_for
from ..answer import answer
from ..bodies.openai import ChatBody
from ..pool.pool import Pool
from ..replies import ChatReply


async def answer_chat(
    request: Request,
    pool: Pool,
    model: str | None,
    chat: ChatBody,
    arrived: float,
    kind: type[ChatReply],
    *,
    stream: bool,
    **options: Any,
) -> Response:
    """Answer a conversation, whole or as a stream.

    Args:
        model: the name that the request gives. chat: the conversation, and what is asked of the answer.
        arrived: when the request came, of ``time.perf_counter``. kind: the form of the answer.
        options: of ``kind``, beside those that follow from the conversation.

    Raises:
        ApiError: that of :meth:`.Pool.use` and :meth:`.Service.chat`.
    """
    async with pool.use(model, request) as service:
        group = await service.chat(chat, arrived)
        tokenizer = service.model.tokenizer
        reply = kind(
            model or service.names[0],
            tokenizer,
            logprobs=bool(chat.logprobs),
            token_ids=bool(chat.return_token_ids),
            parser=partial(parser_for, tokenizer.tool_template or "") if chat.offers_tools else None,
            one_call=chat.parallel_tool_calls is False,
            reasoning=service.reasoning_parser(group),
            with_reasoning=chat.include_reasoning is not False,
            as_ids=bool(chat.return_tokens_as_token_ids),
            prompt_scores=chat.prompt_logprobs is not None,
            **options,
        )
        return await answer(request, service, group, reply, stream=stream)
