"""Tool calls in a model's text, as it comes: in Hermes' tags, which Qwen uses too, in Llama's bare JSON or Python, in
Mistral's lists."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from .overlap import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
# A name, in some versions an id, and what the arguments begin with.
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_CONSTANTS = {"true": True, "false": False, "null": None}
_DECODER = json.JSONDecoder()


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
        found, at = [], 0
        text = text.strip()
        while at < len(text):
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            found.append(value)
            while at < len(text) and text[at] in " \n\r\t;,":
                at += 1
        return self._made(found)

    def _made(self, values: Sequence[Any]) -> list[dict[str, Any]] | None:
        """Calls of objects with a name and arguments; None where there are none, or one is anything else, or
        has NaN or half a character, which Python reads and no client does."""
        found = []
        for value in values:
            name = value.get("name") if isinstance(value, dict) else None
            arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return None
            try:
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                f"{name}{written}".encode()
            except (ValueError, RecursionError):
                return None
            found.append({"name": name, "arguments": written})
        calls = []
        for function in found:
            own = {"index": self.count, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
            calls.append(own | {"function": function})
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
            tag = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self._inside:
                made = self._calls(before)
                # Text between the tags that is no call stays content.
                content += "" if made else OPEN + before + CLOSE
                calls += made or []
            else:
                content += before
            self._held, self._inside = after, not self._inside
        if not self._inside:
            keep = overlap(self._held, OPEN)
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
        return ("", made) if made else (OPEN + held, [])


class JsonParser(ToolParser):
    """A text of nothing but JSON objects with a name is calls; any other text is content."""

    begins: tuple[str, ...] = ("{",)

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._plain = False

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        if self._plain:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith(self.begins):
            return "", []
        self._plain = True
        held, self._held = self._held, ""
        return held, []

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        held, self._held = self._held, ""
        made = self._calls(held)
        return ("", made) if made else (held, [])


class PythonicParser(JsonParser):
    """Llama 3.2's and 4's form, a text of nothing but a list of Python's calls, ``[f(a=1), g()]``, or bare JSON."""

    begins = ("{", "[")

    def _calls(self, text: str) -> list[dict[str, Any]] | None:
        if not text.lstrip().startswith("["):
            return super()._calls(text)
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            return self._made([_python_call(call) for call in tree.elts]) if isinstance(tree, ast.List) else None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None


class MistralParser(JsonParser):
    """Mistral's forms: ``[TOOL_CALLS]`` and a JSON list of calls, or for each call ``[TOOL_CALLS]``, its name,
    ``[ARGS]`` and its arguments, after any text; or bare JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._tail: str | None = None
        self._kept = ""

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        if self._tail is not None:
            self._tail += text
            return "", []
        before, found, after = (self._kept + text).partition(MISTRAL)
        if found:
            self._kept, self._tail = "", after
            return super().feed(before)
        keep = overlap(before, MISTRAL)
        sure = len(before) - keep
        self._kept = before[sure:]
        return super().feed(before[:sure])

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        kept, self._kept = self._kept, ""
        more = super().feed(kept)[0]
        rest, calls = super().flush()
        tail, self._tail = self._tail, None
        if tail is None:
            return more + rest, calls
        made = self._after_tag(tail)
        return (more + rest, calls + made) if made else (more + rest + MISTRAL + tail, calls)

    def _after_tag(self, tail: str) -> list[dict[str, Any]] | None:
        values: list[Any] = []
        try:
            for piece in tail.split(MISTRAL):
                if piece.lstrip().startswith("["):
                    # A list, and whatever the model says after it.
                    values += _DECODER.raw_decode(piece.lstrip())[0]
                elif match := _MISTRAL_CALL.match(piece):
                    values.append({"name": match[1], "arguments": _DECODER.raw_decode(piece, match.end())[0]})
                else:
                    return None
        except (ValueError, RecursionError):
            return None
        return self._made(values)


def _python_call(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("no call with named arguments")
    given = {str(keyword.arg): _python_value(keyword.value) for keyword in call.keywords if keyword.arg}
    if len(given) != len(call.keywords):
        raise ValueError("an argument without a name")
    return {"name": ast.unparse(call.func), "arguments": given}


def _python_value(node: ast.expr) -> Any:
    """A value as JSON has it. Models write JSON's names of constants in Python, too."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(ast.literal_eval(key)): _python_value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no value of JSON")
    return value
