"""What scripts/fuzz.py feeds of texts: what models write, grammars that they are to follow, tokens that these allow."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

from fuzz_seeds import NoInput, value

_WORDS = {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}
SCHEMAS = [
    {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0}, "y": {"enum": ["a"]}}, "required": ["x"]},
    _WORDS | {"$defs": {"a": {"type": "string", "pattern": "^a+$"}}},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "number", "multipleOf": 0.5}, {"const": 1}]},
]
EXPRESSIONS = [rb"(a|b)+[c-e]{2,4}\d*", rb"(?i)x(?:y|z)?\.\p{L}[^\n]", rb"[a-z]+@[a-z]+\.(com|org)"]
GRAMMARS = [
    b'start: item ("," item)*\nitem: WORD | /[0-9]+/\nWORD: "a".."f"+ & ~/ab/\n%ignore " "\n',
    b'root ::= "a" item*\nitem ::= [b-d]{1,3} | "(" root ")"\n',
    b'start: %json {"type": "object"} | x\nx[lazy, max_tokens=4]: /(.|\\n)*z/\n',
]


def letters() -> Any:
    """A tokenizer, of the tokenizers library, of an end and 94 characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = map(chr, range(33, 127))
    backend = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(characters, 1)}}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


@cache
def _compiler() -> Any:
    from trirun_cli.text.grammar import GrammarCompiler

    backend = letters()
    return GrammarCompiler(backend, backend.get_vocab_size(), {0})


def _followed(found: Any, compiler: Any, size: int) -> None:
    """A text of eight tokens at most that follows a grammar."""
    import numpy as np

    text, words = compiler.compile(found)(), np.zeros(-(-size // 32), np.uint32)
    for _ in range(8):
        text.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not len(allowed) or allowed[-1] == 0:
            break
        text.advance(int(allowed[-1]))


def schema(raw: bytes, folder: Path) -> None:
    """A JSON schema that answers are to follow."""
    from trirun_cli.engine.constraint import Grammar

    _followed(Grammar.of_schema(value(raw)), _compiler(), 95)


def expression(raw: bytes, folder: Path, kind: Any = "regex") -> None:
    """A regular expression, or a grammar, that answers are to follow."""
    from trirun_cli.engine.constraint import Grammar

    _followed(Grammar(kind, raw.decode("utf-8", "replace")), _compiler(), 95)


grammar = partial(expression, kind="grammar")


def vocabulary(raw: bytes, folder: Path) -> None:
    """A tokenizer.json whose tokens are masked by a grammar."""
    from trirun_cli.engine.constraint import Grammar
    from trirun_cli.text.grammar import compile_grammar
    from trirun_cli.text.tokenizer import light_tokenizer

    (folder / "tokenizer.json").write_bytes(raw)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = light_tokenizer(folder)
    if tokenizer is None:
        raise NoInput
    compile_grammar(Grammar("regex", "[ab]+"), tokenizer, 4, {1})


def calls(raw: bytes, folder: Path) -> None:
    """What a model has written, in pieces: every parser of tool calls and of reasoning gives valid Unicode and JSON."""
    from trirun_cli.text.harmony import ChannelParser, HarmonyParser
    from trirun_cli.text.reasoning import ReasoningParser
    from trirun_cli.text.tool_parsers import HermesParser, JsonParser, MistralParser, PythonicParser

    text = raw.decode("utf-8", "replace")
    pieces = [text[at : at + 23] for at in range(0, len(text), 23)] if len(text) < 4096 else [text]
    for kind in (HermesParser, JsonParser, PythonicParser, MistralParser, HarmonyParser):
        parser, found = kind(), []
        for piece in pieces:
            found += parser.feed(piece)[1]
        found += parser.flush()[1]
        json.dumps(found, ensure_ascii=False).encode()
        for call in found:
            json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False, allow_nan=False).encode()
    for split in (ChannelParser(), ReasoningParser(False), ReasoningParser(True)):
        told = sum(
            len(part) for piece in [*pieces, None] for part in (split.flush() if piece is None else split.feed(piece))
        )
        assert told <= len(text) + 64


CALLS = [
    b'<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": [1, "\\u00e9"]}}</tool_call>',
    b'{"name": "f", "parameters": {"x": null}}; {"name": "g", "arguments": {"x": [NaN, "\\ud83d\\ude00"]}}',
    b"[f(x=1, y=[True, None, 'a']), a.g(z={'b': -1.5})]",
    b'a[TOOL_CALLS]f[CALL_ID]c[ARGS]{"x": 1}[TOOL_CALLS][{"name": "g", "arguments": {}}]',
    b"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    b'<|message|>{"x": 1}<|call|><|start|>assistant<|channel|>final<|message|>b<|return|>',
]
