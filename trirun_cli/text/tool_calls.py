"""Tool calls in a model's text: in Hermes' tags, which Qwen uses too, or Llama 3's bare JSON.

The chat template tells the model of the tools. What it then generates is free, unless a call is asked for or a tool is
strict: :func:`call_grammar` is the grammar of such answers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.constraint import Grammar
from .grammar import BLANKS

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parser_for(template: str) -> ToolParser:
    """The parser of the tool calls that a chat template asks for."""
    return HermesParser() if _OPEN in template else JsonParser()


def call_grammar(template: str, functions: Mapping[str, Any], *, several: bool = True, forced: bool = True) -> Grammar:
    """The grammar of calls in the form that a chat template asks for.

    Args:
        functions: JSON schemas of the arguments, by name. several: more than one call may come.
        forced: the text is calls alone; otherwise they may stand in a text, or be missing.
    """
    hermes = _OPEN in template
    key = "parameters" if not hermes and '"parameters"' in template else "arguments"
    options = "\n".join(
        f"call_{i}: {json.dumps(json.dumps({'name': name})[:-1] + f', {json.dumps(key)}: ')} "
        f'%json {json.dumps(schema | {"x-guidance": BLANKS})} "}}"'
        for i, (name, schema) in enumerate(functions.items())
    )
    body = "body: " + " | ".join(f"call_{i}" for i in range(len(functions)))
    if hermes and forced:
        more = ' ("\\n" call)*' if several else ""
        rules = f'start: call{more}\ncall: "{_OPEN}\\n" body "\\n{_CLOSE}"'
    elif hermes:
        # Any text until the opening tag, which only a call can follow.
        rules = (
            f'start: opened* TEXT\nopened: trigger "\\n" body "\\n{_CLOSE}"\n'
            f'trigger[lazy]: TEXT "{_OPEN}"\nTEXT: /(.|\\n)*/'
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


class ToolParser:
    """Splits a stream of text into content and tool calls, the latter as OpenAI's documents.

    Attributes:
        count: calls found so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls that are certain after more text."""
        raise NotImplementedError

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls that were held back, at the end of the text."""
        raise NotImplementedError

    def _calls(self, text: str) -> list[dict[str, Any]] | None:
        """The calls in a text of one or more JSON objects, or None where it is anything else."""
        found, decoder, at = [], json.JSONDecoder(), 0
        text = text.strip()
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            name = value.get("name") if isinstance(value, dict) else None
            arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return None
            found.append((name, json.dumps(arguments, ensure_ascii=False)))
            while at < len(text) and text[at] in " \n\r\t;,":
                at += 1
        calls = []
        for name, written in found:
            function = {"name": name, "arguments": written}
            calls.append(
                {"index": self.count, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
            )
            self.count += 1
        return calls or None


class HermesParser(ToolParser):
    """Calls between ``<tool_call>`` and ``</tool_call>``; everything else is content."""

    def __init__(self) -> None:
        super().__init__()
        self._held, self._inside = "", False

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        content, calls = "", []
        self._held += text
        while True:
            tag = _CLOSE if self._inside else _OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self._inside:
                made = self._calls(before)
                # Text between the tags that is no call stays content.
                content += "" if made else _OPEN + before + _CLOSE
                calls += made or []
            else:
                content += before
            self._held, self._inside = after, not self._inside
        if not self._inside:
            keep = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
            sure = len(self._held) - keep
            content += self._held[:sure]
            self._held = self._held[sure:]
        if self.count:
            # Drop line breaks between calls.
            content = content.strip("\n")
        return content, calls

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        # Models often end the text instead of writing the closing tag.
        made = self._calls(held)
        return ("", made) if made else (_OPEN + held, [])


class JsonParser(ToolParser):
    """A text of nothing but JSON objects with a name is calls; any other text is content."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._plain = False

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        if self._plain:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith("{"):
            return "", []
        self._plain = True
        held, self._held = self._held, ""
        return held, []

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        held, self._held = self._held, ""
        made = self._calls(held)
        return ("", made) if made else (held, [])
