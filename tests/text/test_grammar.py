"""Grammars compiled to masks of tokens."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from trirun_cli.engine.constraint import AtLeast, Grammar, mask_filler, mask_words
from trirun_cli.errors import InputError, UsageError
from trirun_cli.text import grammar as grammars
from trirun_cli.text.detokenizer import quick_tokenizer
from trirun_cli.text.grammar import GrammarCompiler, compile_grammar
from trirun_cli.text.tool_calls import call_grammar

pytest.importorskip("llguidance", reason="needs trirun[serve]")
END = 0


@pytest.fixture(scope="module")
def tokenizer(pytestconfig):
    return quick_tokenizer(pytestconfig.rootpath / "configs" / "demo-model")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    backend = tokenizer.backend_tokenizer
    return GrammarCompiler(backend, backend.get_vocab_size(), {END})


def allowed(constraint, vocab):
    words = np.zeros(mask_words(vocab), np.uint32)
    constraint.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[vocab:].any()
    return bits[:vocab].astype(bool)


def accepts(compiler, tokenizer, grammar, text):
    """Whether a whole text, token by token, is one of the grammar."""
    vocab, constraint = tokenizer.backend_tokenizer.get_vocab_size(), compiler.compile(grammar)()
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]:
        if not allowed(constraint, vocab)[token]:
            return False
        constraint.advance(token)
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", "[0-9]{2,3}"), ["12", "123"], ["1", "1234", "12a", ""]),
        (Grammar.of_choices(["one", 'a "b"\n']), ["one", 'a "b"\n'], ["on", "one ", "two"]),
        (Grammar("grammar", 'start: "a" b\nb: /x+/'), ["ax", "axxx"], ["a", "x"]),
        (Grammar("grammar", 'root ::= "a" [xy]+'), ["axy"], ["a", "axz"]),
        (Grammar("json_object"), ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": 1\n}'], ["[]", "1", '{"a"}']),
        (Grammar.of_schema({"type": "integer", "minimum": 3}), ["3", "30"], ["2", "3.5", '"3"']),
        (Grammar.of_schema(True), ["1", "[{}]", "null"], ["nul"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_texts_of_a_grammar_pass_and_no_others(compiler, tokenizer, grammar, good, bad):
    assert [text for text in good if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, grammar, text)] == []


ONE_OF_TWO = {"properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.of_schema({"type": "object", "additionalProperties": False} | ONE_OF_TWO), '{"colour": "blue"}'),
        (Grammar("regex", "(abc|abd)e*"), "abcee"),
        (Grammar.of_choices(["one", "two"]), "two"),
    ],
    ids=["schema", "regex", "choice"],
)
def test_a_token_is_taken_without_a_mask_where_a_mask_has_it(compiler, tokenizer, grammar, text):
    vocab, opened = tokenizer.backend_tokenizer.get_vocab_size(), set()
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], END]

    def after(count):
        constraint = compiler.compile(grammar)()
        for token in tokens[:count]:
            constraint.advance(token)
        return constraint

    for count in range(len(tokens)):
        mask = allowed(after(count), vocab)
        opened.add(after(count).is_open())
        assert mask.sum() > 1 or not after(count).is_open()
        for token in {END, *np.flatnonzero(mask)[:20].tolist(), *np.flatnonzero(~mask)[::400].tolist()}:
            constraint = after(count)
            # A mask alone may know of an end that no other token could be.
            assert (taken := constraint.take(token)) == mask[token] or (token == END and not taken)
            # What was refused has changed nothing.
            assert taken or (allowed(constraint, vocab) == mask).all()
    # After the end a mask has the last word.
    assert opened == {True, False} and not after(len(tokens)).take(END)


def test_blanks_end(compiler, tokenizer):
    """A weak model would fill its context with them."""
    schema = Grammar.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(compiler, tokenizer, schema, '{\n    "a": 1\n}')
    assert not accepts(compiler, tokenizer, schema, "{" + " " * 200 + '"a": 1}')
    assert not accepts(compiler, tokenizer, schema, '{\n\n\n"a": 1}')


@pytest.mark.parametrize("ends", [{END}, {END, 5}])
def test_after_the_end_only_the_end(tokenizer, ends):
    """A step that is on its way when the text has ended asks once more."""
    backend = tokenizer.backend_tokenizer
    vocab = backend.get_vocab_size()
    constraint = GrammarCompiler(backend, vocab, ends).compile(Grammar("regex", "a"))()
    for token in (*tokenizer("a", add_special_tokens=False)["input_ids"], END, END):
        constraint.advance(token)
        assert set(np.flatnonzero(allowed(constraint, vocab))) == ends


def test_a_text_that_the_library_gives_up_on_ends_no_later_one(tokenizer):
    """A quote that is said to end texts, too, makes llguidance panic with a lock in its hands."""
    backend = tokenizer.backend_tokenizer
    vocab, quote = backend.get_vocab_size(), backend.token_to_id('"')
    schema = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}
    begin = GrammarCompiler(backend, vocab, {quote}).compile(Grammar.of_schema(schema))
    first, other = begin(), begin()
    for character in '{\n"a":\n"':
        (token,) = backend.encode(character).ids
        assert allowed(first, vocab)[token]
        first.advance(token)
    assert not allowed(first, vocab).any() and not allowed(other, vocab).any()
    assert allowed(begin(), vocab)[backend.token_to_id("{")]


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_of_several_texts_are_those_of_each_alone(compiler, tokenizer, monkeypatch, threads):
    """In threads too, where texts have ended, or have a grammar that grows too complex on the way."""
    import llguidance

    monkeypatch.setattr(grammars, "_threads", lambda: threads)
    monkeypatch.setattr(grammars, "_FEWEST", 1)
    monkeypatch.setattr(grammars, "_executor", lambda: llguidance.LLExecutor(threads) if threads > 1 else None)
    backend = tokenizer.backend_tokenizer
    vocab = backend.get_vocab_size()
    made = llguidance.LLTokenizer(backend.to_str(), n_vocab=vocab, eos_token=[END])
    few = llguidance.LLParserLimits(step_max_items=20)
    twice = 'start: a\na: "x" | a a'
    own = GrammarCompiler(backend, vocab, {END})
    schema, x = Grammar.of_schema({"type": "object"} | ONE_OF_TWO), backend.token_to_id("x")
    ways = [
        (own.compile(schema), backend.encode('{"colour": "blue", "more": 1}').ids),
        (own.compile(Grammar("regex", "(abc|abd)e*")), backend.encode("abceeeee").ids),
        (lambda: AtLeast(9, {END}, own.compile(Grammar("regex", "x*"))()), [x] * 4),
        (grammars._Beginning(lambda: llguidance.LLMatcher(made, twice, log_level=0, limits=few), {END}), [x] * 20),
    ]
    texts = [(*ways[i % len(ways)], i) for i in range(20)]
    alone, together = ([begin() for begin, *_ in texts] for _ in range(2))
    expected, found = np.zeros((2, 30, mask_words(vocab)), np.uint32)
    rows, empty = np.random.default_rng(0).permutation(30)[: len(texts)].tolist(), set()
    for step in range(16):
        for constraint, row in zip(alone, rows, strict=True):
            constraint.fill(expected[row])
        mask_filler(together, found, rows)()
        assert (found == expected).all()
        empty.add(int((expected[rows].any(1) == 0).sum()))
        for (_, tokens, late), *both in zip(texts, alone, together, strict=True):
            # Not all at the same place.
            if step >= late % 3:
                place = step - late % 3
                for constraint in both:
                    constraint.advance(tokens[place] if place < len(tokens) else END)
    # Texts that ended with an error, and none before.
    assert min(empty) == 0 and max(empty) == 5


def test_an_unknown_format_is_a_remark_and_a_known_one_is_held(compiler, tokenizer):
    own = Grammar.of_schema({"type": "string", "format": "name-of-a-cat"})
    assert accepts(compiler, tokenizer, own, '"Tom"')
    date = Grammar.of_schema({"type": "string", "format": "date"})
    assert accepts(compiler, tokenizer, date, '"2026-01-31"') and not accepts(compiler, tokenizer, date, '"Tom"')


def test_values_named_format_stay():
    schema = {"enum": [{"format": "own"}], "properties": {"format": {"type": "string"}}}
    assert json.loads(Grammar.of_schema(schema).source) == schema


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.of_schema({"not": {"type": "string"}}), "not"),
        (Grammar("regex", "["), "unclosed"),
        (Grammar("grammar", "start: nobody"), "nobody"),
        (Grammar("grammar", 'root ::= "a" ['), "end of input"),
        (Grammar("grammar", 'root ::= "a" nobody'), "nobody"),
        (Grammar("regex", "a" * 300_000), "characters"),
    ],
    ids=lambda value: "" if isinstance(value, Grammar) else value,
)
def test_what_cannot_be_held_is_refused(compiler, grammar, says):
    with pytest.raises(UsageError, match=says):
        compiler.compile(grammar)


@pytest.mark.parametrize("schema", [[], "text", 3, None, False])
def test_a_schema_is_an_object_and_allows_something(schema):
    with pytest.raises(UsageError, match=r"object|allows nothing"):
        Grammar.of_schema(schema)


def test_a_model_without_an_end_is_refused(tokenizer):
    with pytest.raises(InputError, match="ends a text"):
        compile_grammar(Grammar("json_object"), tokenizer, 8192, set())


def test_a_tokenizer_that_llguidance_does_not_read_is_refused():
    from tokenizers import Tokenizer, models

    tokenizer = SimpleNamespace(backend_tokenizer=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    with pytest.raises(InputError, match="cannot use this model's tokenizer: can't determine decoder type"):
        compile_grammar(Grammar("regex", "a"), tokenizer, 2, {END})


SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
                "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Bonn"]}}},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
ROME, NOW = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "now", "arguments": {}}'


def tagged(call):
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "options", "good", "bad"),
    [
        (
            "<tool_call>",
            {},
            [tagged(ROME), f"{tagged(ROME)}\n{tagged(NOW)}"],
            ["", "text", f"Well {tagged(NOW)}", tagged('{"name": "who", "arguments": {}}'), tagged(ROME) + " text",
             tagged('{"name": "weather", "arguments": {"city": "Oslo"}}')],
        ),
        ("<tool_call>", {"several": False}, [tagged(ROME)], [f"{tagged(ROME)}\n{tagged(NOW)}"]),
        (
            "<tool_call>",
            {"forced": False},
            ["", "Just a < b.", tagged(NOW), f"Well, {tagged(ROME)} and {tagged(NOW)} done"],
            [tagged('{"name": "weather", "arguments": {}}'), "Well <tool_call>none</tool_call>"],
        ),
        ("plain", {}, [ROME, f"{ROME}; {NOW}"], ["text", f"{ROME} {NOW}"]),
        ('"parameters"', {}, [ROME.replace("arguments", "parameters")], [ROME]),
        ("plain", {"forced": False}, ["", "Text {", NOW], ['{"name": "who", "arguments": {}}']),
    ],
    ids=["tags", "one", "free", "bare", "parameters", "free bare"],
)  # fmt: skip
def test_calls_keep_to_the_schemas_of_their_tools(compiler, tokenizer, template, options, good, bad):
    grammar = call_grammar(template, SCHEMAS, **options)
    assert [text for text in good if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("reasoning", "good", "bad"),
    [
        ("open", ["so</think>12", "</think>\n\n12"], ["12", "so", "so</think>x", "a</think>b</think>12"]),
        ("any", ["12", "<think>so</think>12", "<think>\nso\n</think>\n\n12"], ["so</think>12", "<think>so", "x"]),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_reasoning_comes_before_what_is_asked_for(compiler, tokenizer, kind, reasoning, good, bad):
    source = {"regex": "[0-9]+", "grammar": "start: /[0-9]+/", "json_schema": '{"type": "integer"}'}[kind]
    grammar = Grammar(kind, source, reasoning)
    assert [text for text in good if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, grammar, text)] == []
