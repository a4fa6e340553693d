"""Strict reading of YAML into frozen records: an unknown key or a value of the wrong type is an error that names it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import QuantizationError


def read_mapping(path: str | Path) -> Mapping[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        QuantizationError: the file is missing, is not YAML in UTF-8, or holds something else.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise QuantizationError(f"recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuantizationError(f"recipe {path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise QuantizationError(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise QuantizationError(f"recipe {path}: a mapping of keys to values is needed, got {type(values).__name__}")
    return values


def checked_fields(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, once every key is a field of the dataclass ``cls`` and every scalar has the field's type.

    Raises:
        QuantizationError: a key is unknown (the nearest known one is named), or a value has another type.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    checked = {}
    for key, value in values.items():
        if key not in fields:
            raise QuantizationError(f"{where}: {suggest('key', key, fields)}")
        declared = str(fields[key].type).split(" | ")
        expected = {"int": int, "float": float, "str": str, "bool": bool}.get(declared[0])
        if expected is None or (value is None and "None" in declared):
            checked[key] = value
            continue
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        elif expected is float and isinstance(value, str):
            # YAML 1.1 reads 1e-4 as a string.
            try:
                value = float(value)
            except ValueError:
                raise QuantizationError(f"{where}: {key} must be a float, got {value!r}") from None
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise QuantizationError(f"{where}: {key} must be {expected.__name__}, got {value!r}")
        checked[key] = value
    return checked


def suggest(what: str, value: object, known: Any) -> str:
    """What to say of a value that is not among the known ones: the nearest of them, or all."""
    near = difflib.get_close_matches(str(value), list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} {value!r}; {hint}"
