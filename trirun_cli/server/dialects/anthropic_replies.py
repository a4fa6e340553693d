"""A conversation's answer as Anthropic's Messages API has it: a message of content blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..errors import ApiError
from ..http import sse
from ..replies import ChatReply
from ..request_group import Delta, RequestGroup


class MessageReply(ChatReply):
    """POST /v1/messages. A stream's blocks follow each other: reasoning, text, calls of tools."""

    prefix = "msg"

    def document(self, group: RequestGroup, deltas: Sequence[Delta]) -> dict[str, Any]:
        (delta,) = deltas
        calls = self.extract(delta)
        content: list[dict[str, Any]] = []
        if delta.reasoning:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        if delta.text:
            content.append({"type": "text", "text": delta.text})
        for call in calls:
            content.append(_tool_use(call) | {"input": json.loads(call["function"]["arguments"])})
        message = self._message(group)
        usage = _usage(group)
        return message | {"content": content, "usage": usage} | self._end(group, delta)

    async def events(self, group: RequestGroup) -> AsyncIterator[bytes]:
        usage = _usage(group) | {"output_tokens": 0}
        yield _event({"type": "message_start", "message": self._message(group) | {"content": [], "usage": usage}})
        blocks = _Blocks()
        try:
            async for delta in group.deltas():
                calls = self.extract(delta)
                if delta.reasoning:
                    empty = {"type": "thinking", "thinking": "", "signature": ""}
                    for event in blocks.add(empty, {"type": "thinking_delta", "thinking": delta.reasoning}):
                        yield event
                if delta.text:
                    for event in blocks.add({"type": "text", "text": ""}, {"type": "text_delta", "text": delta.text}):
                        yield event
                for call in calls:
                    part = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
                    for event in blocks.add(_tool_use(call) | {"input": {}}, part, new=True):
                        yield event
                if delta.finish is not None:
                    for event in blocks.close():
                        yield event
                    yield _event({"type": "message_delta", "delta": self._end(group, delta), "usage": _usage(group)})
        except ApiError as error:
            yield _event(error.anthropic_body)
        else:
            yield _event({"type": "message_stop"})

    def _message(self, group: RequestGroup) -> dict[str, Any]:
        empty = {"stop_reason": None, "stop_sequence": None}
        return {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"], **empty}

    def _end(self, group: RequestGroup, delta: Delta) -> dict[str, Any]:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        matched = group.choices[delta.index].matched
        if delta.finish == "stop" and matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": reasons.get(delta.finish or "", "end_turn"), "stop_sequence": None}


class _Blocks:
    """The blocks of a stream: each begins, grows and ends before the next."""

    def __init__(self) -> None:
        self._count, self._open = 0, ""

    def add(self, empty: dict[str, Any], part: dict[str, Any], *, new: bool = False) -> list[bytes]:
        """A part of a block, which begins with ``empty`` where the block before is of another kind."""
        events = []
        if new or self._open != empty["type"]:
            events += self.close()
            self._open = empty["type"]
            start = {"type": "content_block_start", "index": self._count, "content_block": empty}
            events.append(_event(start))
        events.append(_event({"type": "content_block_delta", "index": self._count, "delta": part}))
        return events

    def close(self) -> list[bytes]:
        """The end of the block that is open, if one is."""
        if not self._open:
            return []
        self._open = ""
        self._count += 1
        return [_event({"type": "content_block_stop", "index": self._count - 1})]


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call["function"]["name"]}


def _usage(group: RequestGroup) -> dict[str, int]:
    prompt, cached, generated = group.token_counts
    # Anthropic counts tokens read from the cache apart from the others.
    return {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
            "output_tokens": generated}  # fmt: skip


def _event(document: dict[str, Any]) -> bytes:
    return b"event: %b\n" % document["type"].encode() + sse.event(document)
