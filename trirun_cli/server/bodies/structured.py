"""Fields that ask for structured output: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and the older
``guided_json``, ``guided_regex``, ``guided_choice`` and ``guided_grammar``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...engine.constraint import Grammar
from ...errors import UsageError
from ..errors import ApiError
from .base import Body, at_most

MOST_CHOICES = 4096


class JsonSchemaFormat(Body):
    """A named JSON schema. ``strict`` false asks for no less: the answer follows the schema either way."""

    name: str | None = None
    given: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's: plain text, any JSON object, or an answer to a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's: one of its fields."""

    given: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str] | None, BeforeValidator(at_most(MOST_CHOICES))] = None
    grammar: str | None = None
    json_object: bool | None = None


class GrammarFields(Body):
    """Fields of all endpoints that generate text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, BeforeValidator(at_most(MOST_CHOICES))] = None
    guided_grammar: str | None = None

    @property
    def binds_text(self) -> bool:
        """Whether a field may ask for a grammar; what it says is not looked at."""
        given = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, self.structured_outputs)
        formatted = self.response_format is not None and self.response_format.type != "text"
        return formatted or any(value is not None for value in given)

    def grammar(self) -> tuple[Grammar, str] | None:
        """What the text must be, and the field that asks for it.

        Raises:
            ApiError: 400, naming the field: it is no grammar, or there are several.
        """
        found = [*self._of_format(), *self._of_structured(), *self._of_guided()]
        if len(found) > 1:
            names = " and ".join(name for name, *_ in found)
            raise ApiError(400, f"{names} exclude each other", param=found[1][0], code="invalid_value")
        for name, kind, value in found:
            try:
                return _grammar(kind, value), name
            except (UsageError, ValueError, RecursionError) as error:
                raise ApiError(400, f"{name}: {error}", param=name, code="invalid_value") from error
        return None

    def _of_format(self) -> list[tuple[str, str, Any]]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [("response_format", "json_object", True)]
        if asked.json_schema is None or asked.json_schema.given is None:
            where = "response_format.json_schema.schema"
            raise ApiError(400, f"{where} is required", param=where, code="missing_required_parameter")
        return [("response_format.json_schema.schema", "json", asked.json_schema.given)]

    def _of_structured(self) -> list[tuple[str, str, Any]]:
        asked = self.structured_outputs
        if asked is None:
            return []
        if unknown := sorted(asked.model_extra or {}):
            where = f"structured_outputs.{unknown[0]}"
            raise ApiError(400, f"{where} is not supported", param=where, code="unsupported_parameter")
        fields = {"json": asked.given, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
        given = fields | {"json_object": asked.json_object or None}
        return [(f"structured_outputs.{kind}", kind, value) for kind, value in given.items() if value is not None]

    def _of_guided(self) -> list[tuple[str, str, Any]]:
        given = ((kind, getattr(self, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar"))
        return [(f"guided_{kind}", kind, value) for kind, value in given if value is not None]


def _grammar(kind: str, value: Any) -> Grammar:
    if kind == "json":
        return Grammar.of_schema(json.loads(value) if isinstance(value, str) else value)
    if kind == "choice":
        return Grammar.of_choices(value)
    if kind == "json_object":
        return Grammar("json_object")
    return Grammar("regex" if kind == "regex" else "grammar", value)
