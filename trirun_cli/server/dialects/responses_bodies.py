"""The body of OpenAI's Responses API, and the same as a chat completion's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from ..bodies.base import MOST_MESSAGES, Body, above_zero, at_least, at_most
from ..bodies.openai import ChatBody, StreamOptions
from ..bodies.other_fields import OTHER_FIELDS, Rule, check_other_fields
from ..errors import ApiError

_STORED = "the server stores no responses: send the conversation's earlier items in input"
_RULES: Mapping[str, Rule] = {
    **OTHER_FIELDS,
    "background": Rule((False,), "the server stores no responses, so none could be fetched later"),
    "context_management": Rule(([],), "a conversation is used whole or refused"),
    "conversation": Rule((), _STORED),
    "include": Rule(([],), "responses have all that this server knows of"),
    "max_tool_calls": Rule((), "it limits OpenAI's own tools, of which this server has none"),
    "previous_response_id": Rule((), _STORED),
    "prompt": Rule((), "prompts are kept by OpenAI; this server keeps none"),
    "top_logprobs": Rule((0,), "chat completions have log-probabilities"),
    "truncation": Rule(("disabled",), "a conversation is used whole or refused"),
}
# Fields of a chat completion, as an error names them, and those of a response that they are made of.
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Body):
    """What the text must be; ``given`` is a JSON schema."""

    type: str
    name: str | None = None
    given: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """Options of the reasoning, where the model's chat template knows of it."""

    effort: str | None = None


class ResponseTool(Body):
    """A function that the model may call."""

    type: str
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    model: str | None = None
    # The instructions are one message more.
    input: Annotated[list[dict[str, Any]], BeforeValidator(_items), Field(min_length=1, max_length=MOST_MESSAGES - 1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, AfterValidator(at_least(1))] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, AfterValidator(at_least(0, 2))] = None
    top_p: Annotated[float | None, AfterValidator(above_zero(1))] = None
    tools: Annotated[list[ResponseTool] | None, BeforeValidator(at_most(MOST_MESSAGES))] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    def chat_body(self) -> ChatBody:
        """The same as a chat completion.

        Raises:
            ApiError: 400, naming the field.
        """
        check_other_fields(self.model_extra or {}, _RULES)
        try:
            # The response repeats what was asked for, and must be JSON.
            json.dumps(self.model_dump(exclude_unset=True), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            reason = "is not valid Unicode" if isinstance(error, UnicodeError) else "has a number that is not finite"
            raise ApiError(400, f"the body {reason}", code="invalid_value") from None
        messages = messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }
        body = ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        body.check_fields()
        return body

    def _format(self) -> dict[str, Any] | None:
        asked = self.text and self.text.format
        if not asked or asked.type == "text":
            return None
        if asked.type == "json_object":
            return {"type": "json_object"}
        if asked.type != "json_schema":
            raise _invalid("text.format.type", f"{asked.type!r} is not supported: text, json_object, json_schema")
        if asked.given is None:
            where = "text.format.schema"
            raise ApiError(400, f"{where} is required", param=where, code="missing_required_parameter")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.given}}


def in_its_names(error: ApiError) -> ApiError:
    """An error of a chat completion with the names of a response's fields."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    message = str(error).replace(error.param or "", name)
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat completion's messages of a response's items: a message's reasoning and calls are parts of it there.

    Raises:
        ApiError: 400, naming an item that is not supported.
    """
    found: list[dict[str, Any]] = []
    # The assistant's message that further items of its turn belong to.
    turn: dict[str, Any] | None = None
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise _invalid(f"{where}.role", f"{role!r} is none of user, assistant, system, developer")
            turn = None
            # Chat templates know OpenAI's newer name of the system role seldom.
            role = "system" if role == "developer" else role
            found.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
        elif kind == "function_call_output":
            turn = None
            content = _text(item.get("output"), f"{where}.output")
            found.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
        elif kind in ("message", "reasoning", "function_call"):
            # Reasoning begins a turn, and so does a second text.
            if turn is None or kind == "reasoning" or (kind == "message" and "content" in turn):
                turn = {"role": "assistant"}
                found.append(turn)
            if kind == "message":
                turn["content"] = _text(item.get("content"), f"{where}.content")
            elif kind == "reasoning":
                parts = item.get("content") or item.get("summary") or []
                turn["reasoning_content"] = _text(parts, f"{where}.content")
            else:
                name, arguments = _string(item, "name", where), _string(item, "arguments", where)
                call = {"type": "function", "function": {"name": name, "arguments": arguments}}
                turn.setdefault("tool_calls", []).append({"id": _string(item, "call_id", where), **call})
        else:
            raise _invalid(f"{where}.type", f"items of type {kind!r} are not supported")
    return found


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(where, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise _invalid(f"{where}[{index}].type", f"parts of type {kind!r} are not supported, only text")
        if not isinstance(text, str):
            raise _invalid(f"{where}[{index}].text", "must be a string")
        texts.append(text)
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "must be a string")
    return value


def _tool(index: int, tool: ResponseTool) -> dict[str, Any]:
    if tool.type != "function":
        raise _invalid(f"tools[{index}].type", f"tools of type {tool.type!r} are not supported, only functions")
    if tool.name is None:
        raise _invalid(f"tools[{index}].name", "is required")
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {
        "type": "function",
        "function": {"name": tool.name} | {name: value for name, value in given.items() if value is not None},
    }


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and choice not in ("none", "auto", "required"):
        raise _invalid("tool_choice", 'is "none", "auto", "required" or {"type": "function", "name": ...}')
    return choice


def _invalid(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")
