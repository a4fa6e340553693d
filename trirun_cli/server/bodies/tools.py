"""Fields that offer tools to the model, and what of them its answer must keep to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..errors import ApiError
from .base import MOST_MESSAGES, Body, at_most


class Function(Body):
    """A function that the model may call; its parameters are a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class ToolFields(Body):
    """Tools, and which of them the model must call."""

    tools: Annotated[list[Tool] | None, BeforeValidator(at_most(MOST_MESSAGES))] = None
    tool_choice: Any = None

    @property
    def offers_tools(self) -> bool:
        """Whether the chat template is given the tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_tools(self) -> list[Function]:
        """Of which functions one must be called; empty where none must."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, dict):
            return [function for function in functions if function.name == self._chosen()]
        return functions if self.tool_choice == "required" else []

    @property
    def strict_tools(self) -> list[Function]:
        """The functions, where the arguments of one must follow its schema whenever it is called; otherwise none."""
        functions = [tool.function for tool in self.tools or ()] if self.offers_tools else []
        return functions if any(function.strict for function in functions) else []

    def check_tools(self) -> None:
        """Refuse a choice that is none.

        Raises:
            ApiError: 400, naming the field.
        """
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if choice != "required" and self._chosen() is None:
            message = 'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        if not self.forced_tools:
            what = "there are no tools" if choice == "required" else f"there is no tool {self._chosen()!r}"
            raise ApiError(400, f"tool_choice: {what[:300]}", param="tool_choice", code="invalid_value")

    def _chosen(self) -> str | None:
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None
