"""Structured output as the engine sees it: a grammar that is asked for, and a constraint that masks tokens by it.

:mod:`trirun_cli.text.grammar` compiles the one to the other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, Protocol, Self

import numpy as np

from ..errors import UsageError

# Why a request ends whose constraint leaves no token to choose.
NOTHING_ALLOWED = "the grammar became too complex to follow: no next token is allowed"

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
# Objects within objects of a schema.
MOST_DEPTH = 64
# Objects, lists and values of a schema: some ten times those of the largest in use.
MOST_PARTS = 50_000
# Of the digits of a schema's multipleOf, zeros at the end left out: the least common multiple. llguidance's automaton
# has a state for each remainder; where two of 9,973 and 9,967 meet, it does not end.
MOST_REMAINDERS = 10_000
# Of JSON schema (draft 2020-12, section 7.3) and OpenAPI: a format that is none of them is a remark of the schema's
# author, which a validator ignores.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer"),
    *("regex", "byte", "binary", "password", "int32", "int64", "float", "double"),
}
# What holds values and no schemas.
_VALUES = ("enum", "const", "default", "examples")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be.

    Attributes:
        kind: "json_object" (any JSON object), "json_schema", "regex" (of the Rust crate, anchored at both ends),
            "choice" (a JSON list of texts), or "grammar" (Lark's notation as llguidance extends it, or GBNF).
        source: the schema as JSON, the expression, the list, the grammar; "" for "json_object".
        reasoning: what may come before it: "none"; "any", reasoning in ``<think>`` tags; "open", the end of reasoning
            that the prompt has begun.
    """

    kind: Kind
    source: str = ""
    reasoning: Literal["none", "any", "open"] = "none"

    @classmethod
    def of_schema(cls, schema: Any) -> Grammar:
        """A JSON schema.

        Raises:
            UsageError: it is not an object, allows nothing, is nested too deeply or has too many parts.
        """
        if schema is True:
            schema = {}
        if schema is False:
            raise UsageError("the JSON schema false allows nothing")
        if not isinstance(schema, dict):
            raise UsageError(f"a JSON schema is an object, got {type(schema).__name__}")
        return cls("json_schema", json.dumps(_Remarks().without(schema)))

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Grammar:
        """One of some texts.

        Raises:
            UsageError: there is none, or one is no text.
        """
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise UsageError("choices must be texts, at least one, none of them empty")
        return cls("choice", json.dumps(list(choices)))


class Constraint(Protocol):
    """One text on its way, and which tokens may come next. A mask is a look at the whole vocabulary;
    :meth:`take` and :meth:`is_open` may spare it, and need not."""

    def fill(self, words: np.ndarray) -> None:
        """Write which tokens may come next.

        Args:
            words: uint32 [ceil(vocab / 32)]: bit t % 32 of word t // 32 is set for token t if it may. All zeros where
                the text cannot go on.
        """

    @classmethod
    def filler(cls, constraints: Sequence[Self], masks: np.ndarray, rows: Sequence[int]) -> Callable[[], None]:
        """:func:`mask_filler` of some of this kind; a kind that is faster at it together says how."""
        parts = [(constraint.fill, masks[row]) for constraint, row in zip(constraints, rows, strict=True)]

        def fill() -> None:
            for fill_one, words in parts:
                fill_one(words)

        return fill

    def advance(self, token: int) -> None:
        """The text goes on with this token, one of those that might come."""

    def take(self, token: int) -> bool:
        """:meth:`advance`, where the token is known to be one of those without a mask; whether it was."""
        return False

    def is_open(self) -> bool:
        """Whether more than one token is known to be allowed, without a mask."""
        return False


def mask_filler(constraints: Sequence[Constraint], masks: np.ndarray, rows: Sequence[int]) -> Callable[[], None]:
    """A function that writes the masks of several texts as they stand when it is called: step after step asks for the
    same ones.

    Args:
        masks: uint32 [any, ceil(vocab / 32)], contiguous: words as of :meth:`Constraint.fill`, which are written where
            they are in ``rows``, a row for each of the constraints.
    """
    kinds: dict[type[Constraint], tuple[list[Constraint], list[int]]] = {}
    for constraint, row in zip(constraints, rows, strict=True):
        members, places = kinds.setdefault(type(constraint), ([], []))
        members.append(constraint)
        places.append(row)
    fillers = [kind.filler(members, masks, places) for kind, (members, places) in kinds.items()]
    if len(fillers) == 1:
        return fillers[0]

    def fill() -> None:
        for fill_kind in fillers:
            fill_kind()

    return fill


class AtLeast(Constraint):
    """Keeps a text from ending before it has so many tokens more, in front of another constraint or alone.

    Args:
        count: tokens that are still to come before one of ``ends`` may. inner: what else says which tokens may come.
    """

    def __init__(self, count: int, ends: Iterable[int], inner: Constraint | None) -> None:
        self._count, self._inner = count, inner
        self._ends = np.array(sorted(ends), np.int64)

    def fill(self, words: np.ndarray) -> None:
        """See :class:`Constraint`."""
        if self._inner is None:
            words[:] = 0xFFFFFFFF
        else:
            self._inner.fill(words)
        if self._count > 0:
            before = words.copy()
            bits = np.uint32(1) << (self._ends % 32).astype(np.uint32)
            np.bitwise_and.at(words, self._ends // 32, ~bits)
            # A grammar whose text is complete has the last word.
            if not words.any():
                words[:] = before

    def advance(self, token: int) -> None:
        """See :class:`Constraint`."""
        self._count -= 1
        if self._inner is not None:
            self._inner.advance(token)


class Only(Constraint):
    """Lets some tokens come and no others, in front of another constraint or alone.

    Args:
        ids: of the tokens. vocab: ids are below it. inner: what else says which tokens may come.
    """

    def __init__(self, ids: Iterable[int], vocab: int, inner: Constraint | None) -> None:
        self._mask, self._inner = np.zeros(mask_words(vocab), np.uint32), inner
        tokens = np.array(sorted(set(ids)), np.int64)
        np.bitwise_or.at(self._mask, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))

    def fill(self, words: np.ndarray) -> None:
        """See :class:`Constraint`."""
        if self._inner is None:
            words[:] = self._mask
        else:
            self._inner.fill(words)
            words &= self._mask

    def advance(self, token: int) -> None:
        """See :class:`Constraint`."""
        if self._inner is not None:
            self._inner.advance(token)


class Without(Constraint):
    """Keeps runs of tokens out of a text: the last of a run may not come after the others.

    Args:
        runs: token ids, at least one each. inner: what else says which tokens may come.
    """

    def __init__(self, runs: Iterable[Sequence[int]], inner: Constraint | None) -> None:
        self._runs, self._inner = [tuple(run) for run in runs], inner
        self._tail: tuple[int, ...] = ()
        self._longest = max(map(len, self._runs)) - 1

    def fill(self, words: np.ndarray) -> None:
        """See :class:`Constraint`."""
        if self._inner is None:
            words[:] = 0xFFFFFFFF
        else:
            self._inner.fill(words)
        for *before, last in self._runs:
            if not before or self._tail[-len(before) :] == tuple(before):
                words[last // 32] &= ~np.uint32(1 << last % 32)

    def advance(self, token: int) -> None:
        """See :class:`Constraint`."""
        self._tail = (*self._tail, token)[-self._longest :] if self._longest else ()
        if self._inner is not None:
            self._inner.advance(token)


def mask_words(vocab: int) -> int:
    """Words of a mask over ``vocab`` tokens."""
    return -(-vocab // 32)


class _Remarks:
    """Takes formats of its author's own out of a schema."""

    def __init__(self) -> None:
        self._parts = 0
        self._remainders = 1

    def without(self, schema: Any, depth: int = 0) -> Any:
        """The schema without them."""
        self._parts += 1
        if depth > MOST_DEPTH:
            raise UsageError(f"the JSON schema is nested more than {MOST_DEPTH} levels deep")
        if self._parts > MOST_PARTS:
            raise UsageError(f"the JSON schema has more than {MOST_PARTS} parts")
        if isinstance(schema, list):
            return [self.without(item, depth + 1) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        self._count_remainders(schema.get("multipleOf"))
        own = isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS
        return {
            key: value if key in _VALUES else self.without(value, depth + 1)
            for key, value in schema.items()
            if not (own and key == "format")
        }

    def _count_remainders(self, step: Any) -> None:
        # llguidance refuses larger ones.
        if type(step) in (int, float) and 0 < step < 1e18:
            digits = Decimal(str(step)).normalize().as_tuple().digits
            self._remainders = math.lcm(self._remainders, int("".join(map(str, digits))))
        if self._remainders > MOST_REMAINDERS:
            raise UsageError(
                f"the JSON schema's multipleOf has {self._remainders} remainders, at most {MOST_REMAINDERS} are taken"
            )
