"""The request bodies: OpenAI's fields and vLLM's extensions.

Null is the same as an absent field. What the server does not act on is in :mod:`.other_fields`: an unsupported field
returns 400 with its name, a harmless one is accepted. An unknown field is ignored with a warning.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from ..errors import ApiError
from .base import (
    MOST_BAD_WORDS,
    MOST_BIASES,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_STOPS,
    Body,
    Count,
    Penalty,
    above_zero,
    at_least,
    at_most,
    strings,
)
from .other_fields import check_other_fields
from .structured import GrammarFields
from .tools import ToolFields


def _stops(value: list[str] | None) -> list[str] | None:
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode") from None
    return value


def _token_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_BIASES:
        raise ValueError(f"has {len(value)} tokens, at most {MOST_BIASES} are taken")
    try:
        # JSON keys are strings.
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("its keys must be token ids") from None


def _biases(value: dict[int, float] | None) -> dict[int, float] | None:
    for bias in (value or {}).values():
        at_least(-100, 100)(bias)
    return value


class StreamOptions(Body):
    """What a stream has besides its tokens."""

    include_usage: bool | None = None


class SamplingFields(GrammarFields):
    """Fields of both endpoints."""

    model: str | None = None
    n: Annotated[int | None, AfterValidator(at_least(1, 128))] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, AfterValidator(at_least(0, 100))] = None
    top_p: Annotated[float | None, AfterValidator(above_zero(1))] = None
    top_k: Annotated[int | None, AfterValidator(at_least(-1))] = None
    min_p: Annotated[float | None, AfterValidator(at_least(0, 1))] = None
    seed: Annotated[int | None, AfterValidator(at_least(-(2**63), 2**63 - 1))] = None
    stop: Annotated[
        list[str] | None, BeforeValidator(at_most(MOST_STOPS)), BeforeValidator(strings), AfterValidator(_stops)
    ] = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(at_most(MOST_BIASES))] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, AfterValidator(at_least(0))] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, AfterValidator(above_zero())] = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_bias), AfterValidator(_biases)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, AfterValidator(at_least(0, 20))] = None
    truncate_prompt_tokens: Annotated[int | None, AfterValidator(at_least(-1))] = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str] | None, BeforeValidator(at_most(MOST_BAD_WORDS))] = None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_fields(self) -> None:
        """Refuse unsupported fields and combinations, and warn of unknown fields.

        Raises:
            ApiError: 400, naming the field.
        """
        if self.stop is not None and "" in self.stop:
            raise ApiError(400, "stop: an empty string would stop at once", param="stop", code="invalid_value")
        if self.stream_options is not None and not self.stream:
            message = "stream_options is only for stream: true"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is for answers that are not streamed"
            raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
        if self.truncate_prompt_tokens == 0 or self.allowed_token_ids == []:
            name = "truncate_prompt_tokens" if self.truncate_prompt_tokens == 0 else "allowed_token_ids"
            raise ApiError(400, f"{name}: leaves no token", param=name, code="invalid_value")
        if "" in (self.bad_words or ()):
            raise ApiError(400, "bad_words: an empty string", param="bad_words", code="invalid_value")
        check_other_fields(self.model_extra or {})


def prompts(value: Any) -> list[str] | list[list[int]]:
    """A prompt or prompts, as text or as token ids: always a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if _all_ids(value):
        return [value]
    if len(value) > MOST_PROMPTS:
        raise ValueError(f"has {len(value)} prompts, at most {MOST_PROMPTS} are taken")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if all(isinstance(prompt, list) and _all_ids(prompt) for prompt in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _all_ids(value: list[Any]) -> bool:
    # type(), not isinstance: True is an int but no token id.
    return set(map(type, value)) <= {int}


class CompletionBody(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(prompts)]
    max_tokens: Count = 16
    echo: bool | None = None
    logprobs: Annotated[int | None, AfterValidator(at_least(0, 20))] = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.best_of not in (None, self.n or 1):
            message = "best_of is only supported where it equals n"
            raise ApiError(400, message, param="best_of", code="unsupported_parameter")
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            message = "prompt_logprobs: echo gives the prompt as many alternatives as logprobs asks for"
            raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")


def _text_of(content: Any) -> Any:
    """The content as one string, from a string or a list of text parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text"):
            raise ValueError(f"parts of type {kind!r} are not supported, only text")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part must have a string as its text")
    return "".join(part["text"] for part in content)


class Message(Body):
    """One message of a conversation. Further fields go to the chat template unchanged."""

    role: str
    content: Annotated[str | None, BeforeValidator(_text_of)] = None


class TemplateFields(ToolFields):
    """What the chat template is given beside the messages."""

    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check_template(self) -> None:
        """Refuse combinations that contradict each other.

        Raises:
            ApiError: 400, naming the field.
        """
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise ApiError(400, message, param="continue_final_message", code="invalid_value")


_NOT_OF_CHAT = {"add_special_tokens", "best_of", "echo"}


class ChatBody(TemplateFields, SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], BeforeValidator(at_most(MOST_MESSAGES)), Field(min_length=1)]
    parallel_tool_calls: bool | None = None
    max_tokens: Count = None
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, AfterValidator(at_least(0, 20))] = None
    include_reasoning: bool | None = None

    @property
    def binds_text(self) -> bool:
        """See :class:`.structured.GrammarFields`; tools that are forced or strict bind it too."""
        return super().binds_text or bool(self.forced_tools or self.strict_tools)

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs: true"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        for name in _NOT_OF_CHAT & (self.model_extra or {}).keys():
            if (self.model_extra or {})[name]:
                message = f"{name} is not supported here, but by /v1/completions"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        self.check_tools()
        if self.forced_tools and super().binds_text:
            message = "a grammar and a tool_choice that forces a call exclude each other"
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        self.check_template()


class TokenizeBody(TemplateFields):
    """The body of POST /tokenize: a text, or a conversation as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, BeforeValidator(at_most(MOST_MESSAGES))] = None
    add_special_tokens: bool = True

    def check_fields(self) -> None:
        """Refuse a body without a text, and contradictions.

        Raises:
            ApiError: 400, naming the field.
        """
        if self.prompt is None and not self.messages:
            raise ApiError(400, "prompt or messages is required", param="prompt", code="missing_required_parameter")
        if self.prompt is not None and self.messages is not None:
            message = "prompt and messages exclude each other"
            raise ApiError(400, message, param="messages", code="invalid_value")
        self.check_template()


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
