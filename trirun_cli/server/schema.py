"""The request bodies of the two completion endpoints: OpenAI's fields and vLLM's extensions.

An unsupported field returns 400 with its name; an unknown one is ignored with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .errors import ApiError

log = logging.getLogger("trirun.server")

# Unsupported fields, with the values that change nothing and are therefore taken.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# Fields about the caller, which change nothing.
HARMLESS = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})
_warned: set[str] = set()
# Far beyond any use, and checked before work that grows with them, so that one request cannot block the others.
MOST_PROMPTS = 4096
MOST_MESSAGES = 4096
MOST_BIASES = 1024
MOST_UNKNOWN = 100


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _unicode(value: list[str] | None) -> list[str] | None:
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


def _at_least(low: float, high: float = float("inf"), what: str = "") -> Callable[[Any], Any]:
    rule = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"

    def check(value: Any) -> Any:
        if value is not None and not low <= value <= high:
            raise ValueError(f"must be {rule}{what}, got {value!r}")
        return value

    return check


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value!r}")
    return value


def _positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"must be above 0, got {value!r}")
    return value


def _biases(value: dict[int, float] | None) -> dict[int, float] | None:
    for bias in (value or {}).values():
        _at_least(-100, 100)(bias)
    return value


Penalty = Annotated[float | None, AfterValidator(_at_least(-2, 2))]
Count = Annotated[int | None, AfterValidator(_at_least(0))]


class StreamOptions(BaseModel):
    """What a stream has besides its tokens."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """Fields of both endpoints. None means the same as an absent field."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    n: Annotated[int | None, AfterValidator(_at_least(1, 128))] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, AfterValidator(_at_least(0, 100))] = None
    top_p: Annotated[float | None, AfterValidator(_fraction)] = None
    top_k: Annotated[int | None, AfterValidator(_at_least(-1))] = None
    min_p: Annotated[float | None, AfterValidator(_at_least(0, 1))] = None
    seed: Annotated[int | None, AfterValidator(_at_least(-(2**63), 2**63 - 1))] = None
    stop: Annotated[list[str] | None, BeforeValidator(_strings), Field(max_length=4), AfterValidator(_unicode)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, AfterValidator(_positive)] = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_bias), AfterValidator(_biases)] = None
    return_token_ids: bool | None = None

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
        extra = self.model_extra or {}
        if len(extra) > MOST_UNKNOWN:
            raise ApiError(400, f"the body has {len(extra)} unknown fields", code="invalid_value")
        for name in extra.keys() & UNSUPPORTED.keys():
            if not any(extra[name] == neutral for neutral in UNSUPPORTED[name]):
                message = f"{name} is not supported by this server"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        unknown = sorted(extra.keys() - UNSUPPORTED.keys() - HARMLESS - _warned)
        if unknown and len(_warned) < 1000:
            _warned.update(unknown)
            names = ", ".join(repr(name[:60]) for name in unknown)
            log.warning("ignored fields that this server does not know: %s (said once)", names[:1000])


def _prompts(value: Any) -> list[str] | list[list[int]]:
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

    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: Count = 16
    echo: bool | None = None
    logprobs: Annotated[int | None, AfterValidator(_at_least(0, 20))] = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.best_of not in (None, self.n or 1):
            message = "best_of is only supported where it equals n"
            raise ApiError(400, message, param="best_of", code="unsupported_parameter")


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


class Message(BaseModel):
    """One message of a conversation. Further fields go to the chat template unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str | None, BeforeValidator(_text_of)] = None


class Function(BaseModel):
    """A function that the model may call; its parameters are a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1)]


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class ChatBody(SamplingFields):
    """The body of POST /v1/chat/completions."""

    tools: Annotated[list[Tool] | None, Field(max_length=MOST_MESSAGES)] = None
    tool_choice: Any = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Count = None
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, AfterValidator(_at_least(0, 20))] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def offers_tools(self) -> bool:
        """Whether the chat template is given the tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs needs logprobs: true"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        if self.tool_choice not in (None, "none", "auto"):
            message = "tool_choice: only none and auto are supported"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise ApiError(400, message, param="continue_final_message", code="invalid_value")
