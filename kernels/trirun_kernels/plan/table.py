"""Measured plans and costs as data: ``tables/*.json``, written by scripts/tune_plans.py and read here.

A table holds *constants* by name and *rules*. ``about`` beside numbers says in words what they are and in which unit;
it is dropped on reading. Numbers in keys become integers, and ``256x64`` becomes ``(256, 64)``. A rule is an object
whose last entry is its answer and whose other entries are conditions on the problem: ``">=6144 <8192"`` for numbers,
``"2/3"`` being one, or a word for equality. The first rule that holds is taken.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("tables")
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "": operator.eq
}  # fmt: skip
_BOUND = re.compile(r"(<=|>=|<|>|)(\d+)(?:/(\d+))?")

Facts = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Rule:
    """``answer`` for problems whose facts meet every condition, a name with comparisons each."""

    conditions: tuple[tuple[str, tuple[tuple[Callable[[Any, Any], bool], float | str], ...]], ...]
    answer: Any

    def holds(self, facts: Facts) -> bool:
        """Whether a problem of these facts meets every condition of the rule."""
        for name, bounds in self.conditions:
            fact = facts[name]
            for compare, bound in bounds:
                if not compare(fact, bound):
                    return False
        return True


@cache
def table(name: str) -> dict[str, Any]:
    """A checked-in table by name, read once: see :func:`parsed`."""
    return parsed(stored(name))


def stored(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The table as its file has it.

    Raises:
        FileNotFoundError: there is no such table.
    """
    return json.loads((folder / f"{name}.json").read_text())


def parsed(entry: Any) -> Any:
    """Constants and rules of a table in the form that planners use; ``{"about": ..., "value": v}`` is v."""
    if isinstance(entry, list):
        return [_rule(item) for item in entry] if entry and isinstance(entry[0], dict) else entry
    if not isinstance(entry, dict):
        return entry
    values = {_key(key): parsed(value) for key, value in entry.items() if key != "about"}
    return values["value"] if values.keys() == {"value"} else values


def first(rules: Sequence[Rule], facts: Facts) -> Any:
    """The answer of the first rule that holds; None where none does.

    Raises:
        KeyError: a rule asks for a fact that was not given.
    """
    return next((rule.answer for rule in rules if rule.holds(facts)), None)


def written(entry: Mapping[str, Any]) -> str:
    """A table as text, with a line for every rule, in columns, and for every short object: what a file holds.

    ``json.loads(written(entry)) == entry``.
    """
    return _text(entry, 0) + "\n"


def _rule(row: Mapping[str, Any]) -> Rule:
    *conditions, (_, answer) = row.items()
    return Rule(tuple((name, tuple(map(_bound, str(text).split()))) for name, text in conditions), answer)


def _bound(text: str) -> tuple[Callable[[Any, Any], bool], float | str]:
    match = _BOUND.fullmatch(text)
    if match is None:
        return operator.eq, text
    # Equal fractions are equal floats: a division is rounded once.
    return OPERATORS[match[1]], int(match[2]) / int(match[3] or 1)


def _key(text: str) -> str | int | tuple[int, ...]:
    if re.fullmatch(r"\d+(x\d+)*", text) is None:
        return text
    numbers = tuple(map(int, text.split("x")))
    return numbers if len(numbers) > 1 else numbers[0]


def _text(entry: Any, indent: int) -> str:
    line, inner = json.dumps(entry, ensure_ascii=False), "\n" + " " * (indent + 2)
    is_rules = isinstance(entry, list) and len(entry) > 0 and isinstance(entry[0], dict)
    if is_rules:
        rows = _aligned(entry)
    elif isinstance(entry, dict) and len(line) + indent > 112:
        rows = [f"{json.dumps(key)}: {_text(value, indent + 2)}" for key, value in entry.items()]
    else:
        return line
    brackets = "[]" if is_rules else "{}"
    return f"{brackets[0]}{inner}{f',{inner}'.join(rows)}\n{' ' * indent}{brackets[1]}"


def _aligned(rules: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each rule, equal conditions below each other."""
    names = list(dict.fromkeys(name for rule in rules for name in list(rule)[:-1]))
    (answer,) = {list(rule)[-1] for rule in rules}
    cells = [[f"{json.dumps(n)}: {json.dumps(rule[n])}, " if n in rule else "" for n in names] for rule in rules]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    answers = [f"{json.dumps(answer)}: {json.dumps(rule[answer])}" for rule in rules]
    return [f"{{{conditions}{taken}}}" for conditions, taken in zip(lines, answers, strict=True)]
