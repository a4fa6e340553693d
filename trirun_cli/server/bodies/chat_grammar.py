"""What the answer to a conversation must be: its tool calls, its schema, and the reasoning that may come before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ...engine.constraint import Grammar
from ...errors import UsageError
from ...text.reasoning import OPEN, reasons
from ...text.tool_calls import call_grammar
from ..errors import ApiError
from ..tokenizer import ServerTokenizer
from .openai import ChatBody

_ANY_OBJECT = {"type": "object"}


def reasoning_of(tokenizer: ServerTokenizer, prompt: Sequence[int]) -> Literal["none", "any", "open"]:
    """Whether the answer to a rendered prompt may begin with reasoning ("any"), or the prompt has begun it ("open")."""
    if not reasons(tokenizer.chat_template):
        return "none"
    return "open" if tokenizer.text_of(prompt[-8:]).rstrip().endswith(OPEN) else "any"


def chat_grammar(body: ChatBody, tokenizer: ServerTokenizer, prompt: Sequence[int]) -> tuple[Grammar, str] | None:
    """The grammar of the answer, and the field that asks for it; None where the answer is free.

    Raises:
        ApiError: 400, naming the field.
    """
    asked = _call_grammar(body, tokenizer.tool_template or "") or body.grammar()
    if asked is None:
        return None
    grammar, param = asked
    return replace(grammar, reasoning=reasoning_of(tokenizer, prompt)), param


def _call_grammar(body: ChatBody, template: str) -> tuple[Grammar, str] | None:
    functions = body.forced_tools or body.strict_tools
    if not functions:
        return None
    try:
        # A schema that is none, or too deep, is refused here.
        schemas = {f.name: json.loads(Grammar.of_schema(f.parameters or _ANY_OBJECT).source) for f in functions}
    except UsageError as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="invalid_value") from error
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict)
    return call_grammar(template, schemas, several=several, forced=bool(body.forced_tools)), "tools"
