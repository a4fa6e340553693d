"""The body of Anthropic's Messages API, and the same as a chat completion's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..bodies.base import MOST_MESSAGES, MOST_STOPS, Body, above_zero, at_least, at_most
from ..bodies.openai import ChatBody
from ..errors import ApiError


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Block(Body):
    """A part of a message: text, a call of a tool, its result, or earlier reasoning."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    thinking: str | None = None


Blocks = Annotated[list[Block], BeforeValidator(_blocks), BeforeValidator(at_most(MOST_MESSAGES))]


class AnthropicMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Blocks


class AnthropicTool(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: str | None = None


class AnthropicToolChoice(Body):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before its answer, where its chat template knows of that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class ConversationFields(Body):
    """Fields of a conversation, whether it is answered or only counted."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], BeforeValidator(at_most(MOST_MESSAGES)), Field(min_length=1)]
    system: Annotated[list[Block] | None, BeforeValidator(_blocks), BeforeValidator(at_most(MOST_MESSAGES))] = None
    tools: Annotated[list[AnthropicTool] | None, BeforeValidator(at_most(MOST_MESSAGES))] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None

    def chat_fields(self) -> dict[str, Any]:
        """The conversation in the fields of a chat completion.

        Raises:
            ApiError: 400, naming a block of a kind that is not supported.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            messages += _messages_of(message, f"messages[{index}].content")
        fields: dict[str, Any] = {"messages": messages}
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                }
                for tool in self.tools
            ]
        if self.tool_choice is not None:
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(self.tool_choice.type, self.tool_choice.type)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        return fields


class MessagesBody(ConversationFields):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, AfterValidator(at_least(1))]
    stream: bool | None = None
    temperature: Annotated[float | None, AfterValidator(at_least(0, 1))] = None
    top_p: Annotated[float | None, AfterValidator(above_zero(1))] = None
    top_k: Annotated[int | None, AfterValidator(at_least(0))] = None
    stop_sequences: Annotated[list[str] | None, BeforeValidator(at_most(MOST_STOPS))] = None

    def chat_body(self) -> ChatBody:
        """The same as a chat completion.

        Raises:
            ApiError: 400, naming the field.
        """
        fields = self.chat_fields() | {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        body = ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        body.check_fields()
        return body


class CountBody(ConversationFields):
    """The body of POST /v1/messages/count_tokens."""

    def chat_body(self) -> ChatBody:
        """The same as a chat completion."""
        return ChatBody.model_validate(self.chat_fields())


def _text(blocks: list[Block], where: str) -> str:
    for index, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            message = f"{where}[{index}]: blocks of type {block.type!r} are not supported here, only text"
            raise ApiError(400, message, param=f"{where}[{index}].type", code="invalid_value")
    return "".join(block.text or "" for block in blocks)


def _messages_of(message: AnthropicMessage, where: str) -> list[dict[str, Any]]:
    """OpenAI's messages of one of Anthropic's: the results of tools have a role of their own there."""
    results, texts, calls, reasoning = [], [], [], []
    for index, block in enumerate(message.content):
        if block.type == "tool_result" and message.role == "user":
            inner = block.content if block.content is not None else ""
            if not isinstance(inner, str | list):
                param = f"{where}[{index}].content"
                raise ApiError(400, f"{param} must be text or a list of blocks", param=param, code="invalid_value")
            parts = [Block.model_validate(part) for part in _blocks(inner)]
            content = _text(parts, f"{where}[{index}].content")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content})
        elif block.type == "tool_use" and message.role == "assistant":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type in ("thinking", "redacted_thinking") and message.role == "assistant":
            reasoning.append(block.thinking or "")
        else:
            texts.append(_text([block], f"{where}[{index}]"))
    found: list[dict[str, Any]] = list(results)
    if texts or calls or not results:
        own: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if calls:
            own["tool_calls"] = calls
        if any(reasoning):
            own["reasoning_content"] = "".join(reasoning)
        found.append(own)
    return found
