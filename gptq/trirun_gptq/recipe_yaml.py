"""Recipes as files: YAML read strictly into a frozen record.

An unknown key or a value of the wrong type is an error that names it. :mod:`trirun_gptq.recipe` and
:mod:`trirun_gptq.train.recipe` hold the records themselves.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import QuantizationError

T = TypeVar("T")
_DEEPEST = 64


def load_yaml(path: str | Path, command: str, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``parse`` makes of the mapping that a YAML file holds; of a ``trirun_recipe.yaml``, which trirun writes
    beside a checkpoint, what is under its ``recipe``.

    Args:
        path: of a UTF-8 file. command: whose recipe it is; such a file of another one is refused.
        parse: a record's ``from_dict``; the file's name is put before what it raises.

    Raises:
        QuantizationError: the file is missing, is not YAML, holds no mapping, or ``parse`` refuses it.
    """
    values = _read_mapping(path)
    if "trirun" in values:
        if values.get("command") != command:
            written = f"was written by trirun {values.get('command')}"
            raise QuantizationError(f"recipe {path}: {written} and holds no recipe of trirun {command}")
        values = values.get("recipe", {})
        if not isinstance(values, Mapping):
            raise QuantizationError(f"recipe {path}: its recipe must be a mapping, got {type(values).__name__}")
    try:
        return parse(values)
    except QuantizationError as error:
        raise QuantizationError(f"{path}: {error}") from None


def checked_fields(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, once every key is a field of the dataclass ``cls`` and every scalar has the field's type.

    Args:
        where: what the values belong to; begins every message.

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
        if expected is float and isinstance(value, int | str) and not isinstance(value, bool):
            # YAML 1.1 reads 1e-4 as a string.
            try:
                value = float(value)
            except (OverflowError, ValueError):
                raise QuantizationError(f"{where}: {key} must be a float, got {str(value)[:80]!r}") from None
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise QuantizationError(f"{where}: {key} must be {expected.__name__}, got {value!r}")
        checked[key] = value
    return checked


def string_list(key: str, value: Any) -> tuple[str, ...]:
    """A list of strings, frozen.

    Raises:
        QuantizationError: the value of ``key`` is something else.
    """
    plain = isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
    require(plain, f"{key} must be a list of strings, got {value!r}")
    return tuple(value)


def suggest(what: str, value: object, known: Iterable[str]) -> str:
    """What to say of a value that is not among the known ones: the nearest of them, or all."""
    near = difflib.get_close_matches(str(value), list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {what} {value!r}; {hint}"


def require(condition: bool, message: str) -> None:
    """Refuse a recipe.

    Raises:
        QuantizationError: ``condition`` is false.
    """
    if not condition:
        raise QuantizationError(f"recipe: {message}")


def load_plain(text: str) -> Any:
    """The plain values that YAML text holds. Aliases are refused: a few of them, in lists of each other, stand for more
    values than fit in memory. So is deep nesting: PyYAML looks at every level again for each further character.

    Raises:
        yaml.YAMLError: it is not YAML, has an alias or is nested too deeply.
    """
    import yaml

    class Plain(yaml.SafeLoader):
        def fetch_flow_collection_start(self, kind: Any) -> None:
            if self.flow_level == _DEEPEST:
                raise yaml.YAMLError(f"nested more than {_DEEPEST} levels deep")
            super().fetch_flow_collection_start(kind)

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError(f"aliases are not read: *{self.peek_event().anchor}")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Plain)
    # Of a value that is none of its tag, such as the 31st of February, PyYAML says so in errors of any kind.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _read_mapping(path: str | Path) -> Mapping[str, Any]:
    import yaml

    try:
        values = load_plain(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise QuantizationError(f"recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuantizationError(f"recipe {path}: not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise QuantizationError(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise QuantizationError(f"recipe {path}: a mapping of keys to values is needed, got {type(values).__name__}")
    return values
