"""Recipe keys that are given beside a recipe, on the command line or by a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trirun_gptq.errors import QuantizationError
from trirun_gptq.recipe_yaml import checked_fields

from ..errors import UsageError


def given(record: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not None.

    Raises:
        UsageError: one is no field of the dataclass ``record``, or has another type than it.
    """
    found = {key: value for key, value in settings.items() if value is not None}
    try:
        return checked_fields(record, found, "settings")
    except QuantizationError as error:
        raise UsageError(str(error)) from None
