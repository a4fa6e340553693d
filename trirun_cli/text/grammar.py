"""Structured output: grammars that a text must follow, compiled by llguidance to masks over a model's tokens.

llguidance parses with derivatives of regular expressions and Earley's algorithm over a trie of the vocabulary, and
refuses a schema that it cannot hold an answer to before the first token (Geng et al. 2025, "JSONSchemaBench", compares
it with others; ``scripts/structured_outputs.py`` does for a vocabulary of yours).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import numpy as np

from ..engine.constraint import Constraint, Grammar
from ..errors import InputError, MissingError, UsageError, is_panic
from ..processors import default_threads, one_left_alone
from .reasoning import CLOSE, OPEN

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Characters of a grammar: compiling takes time that grows with them.
MOST_CHARACTERS = 200_000
# What llguidance may do ahead for one grammar, in its own unit. With its own limit of 1,000,000 an expression of 20
# characters takes 3 s and 170 MiB, with this 0.2 s and 5 MiB.
_FUEL = 30_000
# llguidance has a place of four bytes for every id up to a tokenizer's largest.
_MOST_IDS = 1 << 24
# Grammars that are kept.
_COMPILED = 64
# Bytes of masks to fill in threads: waking these takes as long as 24 masks over 8,192 tokens, or 6 over 32,768.
_FEWEST = 24 << 10
# Texts that share a matcher's tables before there is another matcher, and seconds that making all of these may take.
_FAMILY, _MAKING_S = 2, 0.05
_MOST_THREADS = 16
# Of the operators "and" (&) and "not" (~) of llguidance's notation. Time grows exponentially with them: eight of bad
# expressions take 0.1 s to be refused, twelve 11 s.
_MOST_OPERATORS = 8
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*')
# Blanks between the parts of a JSON text: one, or a new line and its indentation. A weak model fills its context with
# blanks where any number of them may come.
BLANKS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"( |\r?\n( {0,24}|\t{1,8}))"}


class GrammarCompiler:
    """Compiles grammars for one model's tokens; of any thread.

    Args:
        backend: the tokenizer, of the tokenizers library. vocab: size of the model's vocabulary.
        stop_ids: tokens that end a text.
    """

    def __init__(self, backend: Any, vocab: int, stop_ids: Collection[int]) -> None:
        self._backend, self._vocab, self._ends = backend, vocab, tuple(sorted(stop_ids))
        self._made: Any = None
        self._making = Lock()
        self._prepared = lru_cache(maxsize=_COMPILED)(self._prepare)

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        """A function that begins a text of that grammar. The same grammar is compiled once.

        Raises:
            UsageError: the grammar is no grammar, or has something that cannot be held.
            MissingError: llguidance is not installed. InputError: the model has no token that ends a text.
        """
        return self._prepared(grammar)

    def _tokenizer(self) -> Any:
        """llguidance's own, a second's work for a large vocabulary: made when it is first needed."""
        with self._making:
            if self._made is None:
                try:
                    import llguidance
                except ModuleNotFoundError as error:
                    fix = "pip install 'trirun[serve]'"
                    raise MissingError("structured output needs llguidance, which is not installed", fix) from error
                if not self._ends:
                    raise InputError("structured output needs a token that ends a text; the model has none")
                if (largest := max(self._backend.get_vocab().values(), default=0)) >= _MOST_IDS:
                    raise InputError(f"structured output cannot use this model's tokenizer: its ids reach {largest:,}")
                try:
                    self._made = llguidance.LLTokenizer(
                        self._backend.to_str(), n_vocab=self._vocab, eos_token=list(self._ends)
                    )
                # It reads only some kinds of tokenizer.json, and gives up on others by a panic.
                except BaseException as error:
                    if not isinstance(error, Exception) and not is_panic(error):
                        raise
                    raise InputError(f"structured output cannot use this model's tokenizer: {_reason(error)}") from None
            return self._made

    def _prepare(self, grammar: Grammar) -> Callable[[], Constraint]:
        tokenizer = self._tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.source) > MOST_CHARACTERS:
            raise UsageError(f"has {len(grammar.source)} characters, at most {MOST_CHARACTERS} are taken")
        try:
            source = _after_reasoning(_for_llguidance(grammar), grammar.reasoning)
        except (ValueError, RecursionError) as error:
            raise UsageError(_reason(error)) from error
        limits = LLParserLimits(initial_lexer_fuel=_FUEL)
        if fault := LLMatcher.validate_grammar(source, tokenizer, limits=limits):
            raise UsageError(_reason(fault))
        begin = _Beginning(lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits), frozenset(self._ends))
        if begin.fault:
            raise UsageError(_reason(begin.fault))
        return begin


def compile_grammar(
    grammar: Grammar | None,
    tokenizer: Any,
    vocab: int,
    stop_ids: Collection[int],
    compilers: dict[frozenset[int], GrammarCompiler] | None = None,
) -> Callable[[], Constraint] | None:
    """A function that begins a text of that grammar, for a tokenizer of :func:`..text.detokenizer.quick_tokenizer`.
    ``compilers`` keeps what was made, by the stop ids, for the next call.

    Raises:
        InputError: the grammar cannot be held, or there is no tokenizer.json. MissingError: llguidance is missing.
    """
    if grammar is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError("structured output needs a tokenizer with a tokenizer.json")
    ends = frozenset(stop_ids)
    compilers = {} if compilers is None else compilers
    compiler = compilers.get(ends) or compilers.setdefault(ends, GrammarCompiler(backend, vocab, ends))
    try:
        return compiler.compile(grammar)
    except UsageError as error:
        raise InputError(f"the {grammar.kind.replace('_', ' ')} cannot be followed: {error}") from error


class _Beginning:
    """Begins texts of one grammar, as copies of a matcher: they share its tables, which the first mask builds, and a
    lock that keeps threads from filling their masks at once. So where there are many there are several to copy.

    Args:
        make: makes one. ends: ids of tokens that end a text.
    """

    def __init__(self, make: Callable[[], Any], ends: Collection[int]) -> None:
        self._make, self._ends = make, ends
        self._families: list[tuple[Any, WeakSet[_Text]]] = []
        self._making = Lock()
        began = perf_counter()
        self.fault = self._add()[0].get_error()
        self._most = min(_threads(), 1 + int(_MAKING_S / (perf_counter() - began)))

    def _add(self) -> tuple[Any, WeakSet[_Text]]:
        matcher = self._make()
        matcher.compute_bitmask()
        self._families.append((matcher, WeakSet()))
        return self._families[-1]

    def __call__(self) -> Constraint:
        with self._making:
            matcher, texts = min(self._families, key=_alive)
            if len(texts) >= _FAMILY and len(self._families) < self._most:
                matcher, texts = self._add()
            matcher.compute_bitmask()
            # Where the library gave up in one of a family's texts, their lock stays broken for all of them.
            if matcher.is_error():
                self._families.remove((matcher, texts))
                matcher, texts = self._add()
            text = _Text(matcher.deep_copy(), id(texts), self._ends)
            texts.add(text)
            return text


def _alive(family: tuple[Any, WeakSet[_Text]]) -> int:
    return len(family[1])


class _Text(Constraint):
    """A text that llguidance follows. Those of a ``family`` share tables."""

    def __init__(self, matcher: Any, family: int, ends: Collection[int]) -> None:
        self._matcher, self._family, self._ends = matcher, family, ends
        self._consume = matcher.consume_token
        # Asking numpy for an address takes as long as a small mask, and the words are the same every time.
        self._words: np.ndarray | None = None
        self._address = self._bytes = 0

    def fill(self, words: np.ndarray) -> None:
        matcher = self._matcher
        if words is not self._words:
            self._words, self._address, self._bytes = words, words.ctypes.data, words.nbytes
        # Of a text that has ended that is the tokens that end one.
        matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
        if matcher.is_error():
            words[:] = 0

    @classmethod
    def filler(cls, constraints: Sequence[Self], masks: np.ndarray, rows: Sequence[int]) -> Callable[[], None]:
        address, size = masks.ctypes.data, masks.strides[0]
        # A thread takes neighbours: they should be those who would wait for each other. One family gains nothing.
        triples = sorted((text._family, row, text._matcher) for text, row in zip(constraints, rows, strict=True))
        pairs = [(matcher, row) for _, row, matcher in triples]
        several = triples[0][0] != triples[-1][0] and len(pairs) * size >= _FEWEST
        executor = _executor() if several else None

        def fill() -> None:
            if executor is not None:
                executor.unsafe_compute_mask_ptr(pairs, address, size, len(masks))
            else:
                for matcher, row in pairs:
                    matcher.unsafe_compute_mask_ptr(address + row * size, size)
            for matcher, row in pairs:
                if matcher.is_error():
                    masks[row] = 0

        return fill

    def advance(self, token: int) -> None:
        # Nothing but the end may come where a text has stopped.
        if token not in self._ends or not self._matcher.is_stopped():
            self._consume(token)

    def take(self, token: int) -> bool:
        matcher = self._matcher
        return not matcher.is_stopped() and matcher.try_consume_tokens([token]) == 1

    def is_open(self) -> bool:
        # All bytes are tokens: where no byte is forced, more than one token may come.
        matcher = self._matcher
        return not matcher.is_stopped() and not matcher.compute_ff_bytes()


@cache
def _threads() -> int:
    # One processor is left to the engine, which delivers meanwhile.
    return max(1, min(default_threads() - 1, _MOST_THREADS))


@cache
def _executor() -> Any:
    """Threads of llguidance's own; None where one would be alone."""
    from llguidance import LLExecutor

    with one_left_alone():
        return LLExecutor(_threads()) if _threads() > 1 else None


def _for_llguidance(grammar: Grammar) -> str:
    from llguidance import LLMatcher, gbnf_to_lark

    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=BLANKS)
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.source, defaults=BLANKS)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.source))))
    try:
        source = gbnf_to_lark.any_to_lark(grammar.source)
    # Of GBNF that is wrong it raises Exception and kinds of its own.
    except Exception as error:
        raise ValueError(str(error)) from error
    operators = len(re.findall(r"[&~](?!\s*\d)", _QUOTED.sub("", source)))
    if operators > _MOST_OPERATORS:
        raise ValueError(f"the grammar has {operators} operators & and ~, at most {_MOST_OPERATORS} are taken")
    return LLMatcher.grammar_from_lark(source)


def _after_reasoning(source: str, kind: str) -> str:
    """A grammar of llguidance's, as JSON or in Lark's notation, as the part of a text that follows its reasoning."""
    if kind == "none":
        return source
    if not source.startswith("{"):
        source = json.dumps({"grammars": [{"lark_grammar": source}]})
    answer, *rest = json.loads(source)["grammars"]
    first = "think BLANK" if kind == "open" else f'("{OPEN}" think BLANK)?'
    whole = (
        f"start: {first} @answer\nBLANK: /[\\n ]{{0,4}}/\nthink[lazy]: /(.|\\n)*{CLOSE.replace('/', chr(92) + '/')}/"
    )
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": whole}, answer | {"name": "answer"}, *rest]})


def _reason(fault: Any) -> str:
    return " ".join(str(fault).split())[:300]
