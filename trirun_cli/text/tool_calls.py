"""Tool calls as a chat template asks for them, and as it is given earlier ones.

The chat template tells the model of the tools. What it then generates is free, unless a call is asked for or a tool is
strict: :func:`call_grammar` is the grammar of such answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.constraint import Grammar
from .grammar import BLANKS
from .harmony import HarmonyParser, has_channels
from .tool_parsers import CLOSE, MISTRAL, OPEN, HermesParser, JsonParser, MistralParser, PythonicParser, ToolParser

# How templates of Llama 3.2 and Llama 4 show the model the calls of Python that they ask for.
_PYTHONIC = "[func_name1("


def parser_for(template: str) -> ToolParser:
    """The parser of the tool calls that a chat template asks for."""
    if has_channels(template):
        return HarmonyParser()
    if MISTRAL in template:
        return MistralParser()
    if OPEN in template:
        return HermesParser()
    return PythonicParser() if _PYTHONIC in template else JsonParser()


def special_calls(template: str) -> bool:
    """Whether the calls that a chat template asks for begin with special tokens, which are no text elsewhere."""
    return MISTRAL in template or has_channels(template)


def call_grammar(template: str, functions: Mapping[str, Any], *, several: bool = True, forced: bool = True) -> Grammar:
    """The grammar of calls in the form that a chat template asks for.

    Args:
        functions: JSON schemas of the arguments, by name. several: more than one call may come.
        forced: the text is calls alone; otherwise they may stand in a text, or be missing.

    Where the form is not Hermes', the calls are bare JSON, which every other parser reads too.
    """
    hermes = OPEN in template and MISTRAL not in template and not has_channels(template)
    key = "parameters" if not hermes and '"parameters"' in template else "arguments"
    options = "\n".join(
        f"call_{i}: {json.dumps(json.dumps({'name': name})[:-1] + f', {json.dumps(key)}: ')} "
        f'%json {json.dumps(schema | {"x-guidance": BLANKS})} "}}"'
        for i, (name, schema) in enumerate(functions.items())
    )
    body = "body: " + " | ".join(f"call_{i}" for i in range(len(functions)))
    if hermes and forced:
        more = ' ("\\n" call)*' if several else ""
        rules = f'start: call{more}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"'
    elif hermes:
        # Any text until the opening tag, which only a call can follow.
        rules = (
            f'start: opened* TEXT\nopened: trigger "\\n" body "\\n{CLOSE}"\n'
            f'trigger[lazy]: TEXT "{OPEN}"\nTEXT: /(.|\\n)*/'
        )
    else:
        more = ' ("; " body)*' if several else ""
        rules = f"start: calls\ncalls: body{more}" if forced else f"start: calls | TEXT\ncalls: body{more}"
        rules += "" if forced else "\nTEXT: /([^{ \\n](.|\\n)*)?/"
    return Grammar("grammar", "\n".join(("%llguidance {}", rules, body, options)))


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the arguments of earlier calls as objects, where OpenAI has a JSON string."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
