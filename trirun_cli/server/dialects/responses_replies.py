"""An answer as OpenAI's Responses API has it: items of output, whole or as the events that they grow by."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..errors import ApiError
from ..http import sse
from ..replies import ChatReply
from ..request_group import Delta, RequestGroup
from .responses_bodies import ResponsesBody

_Event = dict[str, Any]


class ResponseReply(ChatReply):
    """POST /v1/responses.

    Args:
        body: the request, whose settings are part of the response.
    """

    prefix = "resp"

    def __init__(self, *args: Any, body: ResponsesBody, **options: Any) -> None:
        super().__init__(*args, **options)
        self._body, self._output = body, Output()

    def document(self, group: RequestGroup, deltas: Sequence[Delta]) -> dict[str, Any]:
        for delta in deltas:
            for _ in self._grow(delta):
                pass
        return self._response(group, deltas[0].finish)

    async def events(self, group: RequestGroup) -> AsyncIterator[bytes]:
        number, finish = 0, None

        def encoded(event: _Event) -> bytes:
            nonlocal number
            number += 1
            return b"event: %b\n" % event["type"].encode() + sse.event(event | {"sequence_number": number - 1})

        for kind in ("response.created", "response.in_progress"):
            yield encoded({"type": kind, "response": self._response(group, None)})
        try:
            async for delta in group.deltas():
                for event in self._grow(delta):
                    yield encoded(event)
                finish = delta.finish or finish
        except ApiError as error:
            failed = {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
            yield encoded({"type": "response.failed", "response": self._response(group, None) | failed})
        else:
            response = self._response(group, finish)
            yield encoded({"type": f"response.{response['status']}", "response": response})

    def _grow(self, delta: Delta) -> Iterator[_Event]:
        calls = self.extract(delta)
        if delta.reasoning:
            yield from self._output.write("reasoning", delta.reasoning)
        if delta.text:
            yield from self._output.write("message", delta.text)
        for call in calls:
            yield from self._output.call(call)
        if delta.finish is not None:
            if not self._output.items:
                yield from self._output.write("message", "")
            yield from self._output.close("incomplete" if delta.finish == "length" else "completed")

    def _response(self, group: RequestGroup, finish: str | None) -> dict[str, Any]:
        given = self._body.model_dump(exclude_unset=True, by_alias=True)
        status = "in_progress" if finish is None else "incomplete" if finish == "length" else "completed"
        return {
            "id": str(self._head["id"]).replace("-", "_"),
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "metadata": given.get("metadata") or {},
            "model": self._head["model"],
            "output": self._output.items,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self._body.reasoning and self._body.reasoning.effort, "summary": None},
            # Whatever was asked for: nothing is.
            "store": False,
            "temperature": self._body.temperature,
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": self._body.tool_choice or "auto",
            "tools": given.get("tools", []),
            "top_p": self._body.top_p,
            "truncation": "disabled",
            "usage": None if finish is None else self._usage(group),
        }

    def _usage(self, group: RequestGroup) -> dict[str, Any]:
        prompt, cached, generated = group.token_counts
        reasoning = self._tokenizer.count(self._output.reasoning)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, generated)},
            "total_tokens": prompt + generated,
        }


class Output:
    """Items of output as they grow: reasoning, messages and calls, each with the events of its growth.

    Attributes:
        items: those that there are; the last may still grow, and is in here as far as it is complete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    @property
    def reasoning(self) -> str:
        """The text of all reasoning."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def write(self, kind: str, text: str) -> Iterator[_Event]:
        """More text of an item of a kind, "reasoning" or "message", which begins where the last is of another."""
        if self._open is None or self._open["type"] != kind:
            yield from self.close("completed")
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            else:
                part, item = {"type": "reasoning_text", "text": ""}, {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            self._open = {**item, "type": kind, "status": "in_progress", "content": [part]}
            self.items.append(self._open)
            yield self._event("output_item.added", item=self._open | {"content": []})
            yield self._part_event("content_part.added", part=dict(part))
        (part,) = self._open["content"]
        part["text"] += text
        if text:
            yield self._part_event(f"{part['type']}.delta", delta=text, **_no_logprobs(part))

    def call(self, call: dict[str, Any]) -> Iterator[_Event]:
        """A call of a function, which is known whole."""
        yield from self.close("completed")
        function = call["function"]
        own = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"]}
        self._open = {**own, "name": function["name"], "arguments": "", "status": "in_progress"}
        self.items.append(self._open)
        yield self._event("output_item.added", item=dict(self._open))
        self._open["arguments"] = function["arguments"]
        where = {"item_id": own["id"]}
        yield self._event("function_call_arguments.delta", delta=function["arguments"], **where)
        done = {"arguments": function["arguments"], "name": function["name"]}
        yield self._event("function_call_arguments.done", **where, **done)
        yield from self.close("completed")

    def close(self, status: str) -> Iterator[_Event]:
        """The end of the item that is open, if one is."""
        item = self._open
        if item is None:
            return
        if "content" in item:
            (part,) = item["content"]
            yield self._part_event(f"{part['type']}.done", text=part["text"], **_no_logprobs(part))
            yield self._part_event("content_part.done", part=dict(part))
        item["status"] = status
        yield self._event("output_item.done", item=item)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> _Event:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> _Event:
        return self._event(kind, item_id=self.items[-1]["id"], content_index=0, **fields)


def _no_logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == "output_text" else {}
