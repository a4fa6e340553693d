"""What the bodies of all requests share: a JSON object without nulls, and checks of its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

# Far beyond any use, and checked before work that grows with them, so that one request cannot block the others.
MOST_PROMPTS = 4096
MOST_MESSAGES = 4096
MOST_BIASES = 1024
MOST_STOPS = 4
MOST_BAD_WORDS = 256


def strings(value: Any) -> Any:
    """A string as a list of it; anything else as it is."""
    return [value] if isinstance(value, str) else value


def at_least(low: float, high: float = float("inf"), what: str = "") -> Callable[[Any], Any]:
    """A check that a number is in this range; None passes."""
    rule = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"

    def check(value: Any) -> Any:
        if value is not None and not low <= value <= high:
            raise ValueError(f"must be {rule}{what}, got {value!r}")
        return value

    return check


def above_zero(most: float = float("inf")) -> Callable[[float | None], float | None]:
    """A check that a number is above 0 and at most ``most``; None passes."""
    rule = "above 0" if most == float("inf") else f"above 0 and at most {most:g}"

    def check(value: float | None) -> float | None:
        if value is not None and not 0 < value <= most:
            raise ValueError(f"must be {rule}, got {value!r}")
        return value

    return check


Penalty = Annotated[float | None, AfterValidator(at_least(-2, 2))]
Count = Annotated[int | None, AfterValidator(at_least(0))]


def at_most(count: int) -> Callable[[Any], Any]:
    """A check of a list's length, before its items are looked at; anything else passes."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > count:
            raise ValueError(f"has {len(value)} items, at most {count} are taken")
        return value

    return check


class Body(BaseModel):
    """A JSON object in which null is the same as an absent field, unless the field is required."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}
