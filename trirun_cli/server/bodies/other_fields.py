"""Fields of a request body that the server does not act on: which are accepted, and why; which are refused.

One table for the completion endpoints, which /v1/responses adds to. A field that is null is absent, whatever it is, so
no entry names null.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ApiError

log = logging.getLogger("trirun.server")


class Rule(NamedTuple):
    """What happens to a field.

    Attributes:
        values: those that are accepted; None accepts every one. Any other value returns 400 with the field's name.
        reason: why these values can be accepted without being acted on, or why the others cannot.
    """

    values: tuple[Any, ...] | None
    reason: str


_TEXT_ONLY = "the server reads and writes text"
_STORED = "a label of what OpenAI stores; this server stores nothing"
_CACHE = "where OpenAI caches prompts and how long; this server's prefix cache needs no hint"

OTHER_FIELDS: Mapping[str, Rule] = {
    # Accepted with every value: the answer is the same without them.
    "store": Rule(None, "OpenAI keeps answers for its dashboard; this server stores nothing"),
    "metadata": Rule(None, _STORED),
    "user": Rule(None, "names the caller's own user, for OpenAI's abuse reports"),
    "safety_identifier": Rule(None, "the successor of user"),
    "prompt_cache_key": Rule(None, _CACHE),
    "prompt_cache_options": Rule(None, _CACHE),
    "prompt_cache_retention": Rule(None, _CACHE),
    "service_tier": Rule(None, "a price list; here is one tier, and every request has it"),
    "prediction": Rule(None, "a guess of the answer that lets OpenAI be faster and changes no token"),
    "verbosity": Rule(None, "a hint to OpenAI's models about length; others do not know it"),
    "cache_salt": Rule(None, "separates callers' caches, which changes no token"),
    "request_id": Rule(None, "the header X-Request-Id names a request"),
    "parallel_tool_calls": Rule(None, "chat completions act on it; there are no tools elsewhere"),
    "reasoning_effort": Rule(None, "chat templates are given it; there is none elsewhere"),
    # Accepted where they ask for what happens anyway.
    "audio": Rule((), _TEXT_ONLY),
    "chat_template": Rule((), "a template is a program; the server's own is chosen by --chat-template"),
    "detokenize": Rule((True,), "return_token_ids gives token ids beside the text"),
    "documents": Rule(([],), "put texts into the messages"),
    "guided_decoding_backend": Rule((), "llguidance compiles every grammar"),
    "guided_whitespace_pattern": Rule((), "JSON has a space or line breaks and indents where it may have blanks"),
    "include_reasoning": Rule((True,), "chat completions act on it; there is no reasoning elsewhere"),
    "kv_transfer_params": Rule((), "one server computes prompts and answers"),
    "logprob_token_ids": Rule(([],), "log-probabilities are those of the likeliest tokens"),
    "mm_processor_kwargs": Rule(({},), _TEXT_ONLY),
    "modalities": Rule((["text"],), _TEXT_ONLY),
    "ec_transfer_params": Rule((), _TEXT_ONLY),
    "media_io_kwargs": Rule(({},), _TEXT_ONLY),
    "return_mm_kwargs": Rule(None, "of vLLM's endpoints that only render, which are not here"),
    "return_prompt_text": Rule((False,), "/tokenize of messages gives the ids, /detokenize their text"),
    "return_token_offsets": Rule((False,), "of vLLM's endpoints that only render, which are not here"),
    "routed_experts_prompt_start": Rule((0,), "which experts a token took is not told"),
    "session_id": Rule(None, "names a conversation for a router; the prefix cache needs no name"),
    "stream_interval": Rule(None, "--stream-interval says how often chunks are sent; they hold the same tokens"),
    "thinking_token_budget": Rule((), "max_tokens limits reasoning and answer together"),
    "truncation_side": Rule(("left",), "truncate_prompt_tokens keeps the last tokens"),
    "watermarking": Rule((False,), "texts are not marked"),
    "function_call": Rule(("none",), "OpenAI has replaced it by tool_choice"),
    "functions": Rule(([],), "OpenAI has replaced it by tools"),
    "length_penalty": Rule((1,), "of beam search, which this server does not do"),
    "logits_processors": Rule(([],), "code from a request is not run"),
    "moderation": Rule((), "neither prompts nor answers are moderated"),
    "priority": Rule((0,), "requests run in the order in which they come"),
    "prompt_embeds": Rule((), _TEXT_ONLY),
    "repetition_detection": Rule((), "frequency_penalty and repetition_penalty keep texts from repeating"),
    "spaces_between_special_tokens": Rule(None, "special tokens are not part of the text"),
    "structural_tag": Rule((), "a grammar, or strict tools, say what follows a tag"),
    "suffix": Rule(("",), "the model continues a text and does not fill a gap"),
    "tool_choice": Rule(("none",), "tools are offered to chat completions"),
    "tools": Rule(([],), "tools are offered to chat completions"),
    "use_beam_search": Rule((False,), "of beam search, which this server does not do"),
    "vllm_xargs": Rule(({},), "there are no extensions that would read them"),
    "web_search_options": Rule((), "the server reads nothing from the web"),
}


_MOST_UNKNOWN = 100
_warned: set[str] = set()


def check_other_fields(fields: Mapping[str, Any], rules: Mapping[str, Rule] = OTHER_FIELDS) -> None:
    """Refuse unsupported fields, and warn of unknown ones, once each.

    Args:
        fields: of a body, those that are not in its schema. rules: of its endpoint.

    Raises:
        ApiError: 400, naming the field.
    """
    if len(fields) > _MOST_UNKNOWN:
        raise ApiError(400, f"the body has {len(fields)} unknown fields", code="invalid_value")
    for name in fields.keys() & rules.keys():
        rule = rules[name]
        if rule.values is not None and not any(fields[name] == value for value in rule.values):
            message = f"{name} is not supported by this server: {rule.reason}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    unknown = sorted(fields.keys() - rules.keys() - _warned)
    if unknown and len(_warned) < 1000:
        _warned.update(unknown)
        names = ", ".join(repr(name[:60]) for name in unknown)
        log.warning("ignored fields that this server does not know: %s (said once)", names[:1000])
