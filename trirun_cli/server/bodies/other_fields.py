"""Fields of a request body that the server does not act on: which are accepted, and why; which are refused.

One table for both endpoints. A field that is null is absent, whatever it is, so no entry names null.
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
    "parallel_tool_calls": Rule(None, "chat completions act on it; there are no tools elsewhere"),
    "reasoning_effort": Rule(None, "chat templates are given it; there is none elsewhere"),
    # Accepted where they ask for what happens anyway.
    "audio": Rule((), _TEXT_ONLY),
    "modalities": Rule((["text"],), _TEXT_ONLY),
    "function_call": Rule(("none",), "OpenAI has replaced it by tool_choice"),
    "functions": Rule(([],), "OpenAI has replaced it by tools"),
    "length_penalty": Rule((1,), "of beam search, which this server does not do"),
    "logits_processors": Rule(([],), "code from a request is not run"),
    "moderation": Rule((), "neither prompts nor answers are moderated"),
    "priority": Rule((0,), "requests run in the order in which they come"),
    "prompt_embeds": Rule((), _TEXT_ONLY),
    "prompt_logprobs": Rule((), "echo with logprobs has the prompt's log-probabilities"),
    "suffix": Rule(("",), "the model continues a text and does not fill a gap"),
    "tool_choice": Rule(("none",), "tools are offered to chat completions"),
    "tools": Rule(([],), "tools are offered to chat completions"),
    "truncate_prompt_tokens": Rule((), "a prompt is used whole or refused"),
    "use_beam_search": Rule((False,), "of beam search, which this server does not do"),
    "web_search_options": Rule((), "the server reads nothing from the web"),
}


_MOST_UNKNOWN = 100
_warned: set[str] = set()


def check_other_fields(fields: Mapping[str, Any]) -> None:
    """Refuse unsupported fields, and warn of unknown ones, once each.

    Args:
        fields: of a body, those that are not in its schema.

    Raises:
        ApiError: 400, naming the field.
    """
    if len(fields) > _MOST_UNKNOWN:
        raise ApiError(400, f"the body has {len(fields)} unknown fields", code="invalid_value")
    for name in fields.keys() & OTHER_FIELDS.keys():
        rule = OTHER_FIELDS[name]
        if rule.values is not None and not any(fields[name] == value for value in rule.values):
            message = f"{name} is not supported by this server: {rule.reason}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    unknown = sorted(fields.keys() - OTHER_FIELDS.keys() - _warned)
    if unknown and len(_warned) < 1000:
        _warned.update(unknown)
        names = ", ".join(repr(name[:60]) for name in unknown)
        log.warning("ignored fields that this server does not know: %s (said once)", names[:1000])
