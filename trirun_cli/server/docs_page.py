"""The page /docs: every endpoint with the fields of its body, as one HTML document without scripts.

It is made from the same OpenAPI document as /openapi.json. It names no other host, so it works offline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from .bodies.other_fields import OTHER_FIELDS

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
h2 { border-top: 1px solid #8888; padding-top: 1rem } code { font-size: 90% }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .2rem .6rem; text-align: left }
"""


def render(openapi: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document."""
    schemas = openapi.get("components", {}).get("schemas", {})
    info = openapi["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('description', ''))} This page as a document for programs: ",
        '<a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                parts.append(_fields(_resolved(body["schema"], schemas)))
    parts.append("<h2>Other fields of the completion endpoints</h2>")
    accepted = (
        (
            name,
            "any value" if rule.values is None else ", ".join(map(repr, rule.values)) or "only null",
            rule.reason,
        )
        for name, rule in OTHER_FIELDS.items()
    )
    parts.append(_table(("field", "accepted", "reason"), accepted))
    return "\n".join(parts) + "</html>\n"


def _fields(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = (
        (name, _type(field), "required" if name in required else _default(field))
        for name, field in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    )
    return _table(("field", "type", "default"), rows)


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _type(field: Mapping[str, Any]) -> str:
    """A field's type in words: "string", "array of integer", "StreamOptions"."""
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[1]
    if "anyOf" in field:
        # Every optional field may be null.
        return " or ".join(_type(kind) for kind in field["anyOf"] if kind.get("type") != "null")
    if "const" in field:
        return repr(field["const"])
    if field.get("type") == "array" and field.get("items"):
        return f"array of {_type(field['items'])}"
    return field.get("type", "any")


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{escape(cell)}" for cell in head)]
    for name, *cells in rows:
        lines.append(f"<tr><td><code>{escape(name)}</code>" + "".join(f"<td>{escape(cell)}" for cell in cells))
    return "\n".join(lines) + "</table>"
