"""Forms of tool calls besides Hermes' and bare JSON: Mistral's two and Python's, chosen by the chat template."""

import asyncio
import copy
import json

import pytest

from tests.server.conftest import Site
from trirun_cli.text.detokenizer import load_tokenizer
from trirun_cli.text.tool_calls import parser_for
from trirun_cli.text.tool_parsers import HermesParser, JsonParser, MistralParser, PythonicParser

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
BODY = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 90}


def parse(parser, text, size):
    content, calls = "", []
    for at in range(0, len(text), size):
        more, made = parser.feed(text[at : at + size])
        content, calls = content + more, calls + made
    rest, made = parser.flush()
    found = [(c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls + made]
    assert parser.count == len(found)
    return content + rest, found


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (MISTRAL, MistralParser),
        ("tools <tool_call>", HermesParser),
        ("tools [func_name1(params_name1=params_value1)]", PythonicParser),
        ('tools {"name": function name, "parameters": ...}', JsonParser),
    ],
)
def test_the_template_chooses_the_form(template, parser):
    assert type(parser_for(template)) is parser


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, {"name": "g", "arguments": {}}]', ""),
        ('I look. [TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}, {"name": "g"}]', "I look. "),
        ('[TOOL_CALLS]f[ARGS]{"x": [1]}[TOOL_CALLS]g[ARGS]{}', ""),
        ('So: [TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": [1]}[TOOL_CALLS]g[CALL_ID]b2[ARGS]{}', "So: "),
        ('[TOOL_CALLS]f{"x": [1]}[TOOL_CALLS]g{}', ""),
        ('{"name": "f", "arguments": {"x": [1]}}; {"name": "g"}', ""),
    ],
)
def test_mistrals_forms(text, content, size):
    assert parse(MistralParser(), text, size) == (content, [(0, "f", {"x": [1]}), (1, "g", {})])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    ["", "plain [TOOL", "[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"x"', "[TOOL_CALLS][3]", "a [TOOL_CALLS] b", "{x", "[1]"],
)
def test_what_is_no_call_of_mistrals_is_shown(text, size):
    assert parse(MistralParser(), text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_python(size):
    text = '[f(x=[1, -2.5], s="a, b)", t=true, n=None, d={"k": false}), g.h()]'
    arguments = {"x": [1, -2.5], "s": "a, b)", "t": True, "n": None, "d": {"k": False}}
    assert parse(PythonicParser(), text, size) == ("", [(0, "f", arguments), (1, "g.h", {})])
    assert parse(PythonicParser(), '{"name": "f", "parameters": {}}', size) == ("", [(0, "f", {})])


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[f(1)]",
        "[f(**x)]",
        "[f(x=open('a'))]",
        "[f(x=y)]",
        "[f(x=1",
        "[]",
        "[f(x=1)] and",
        "[" * 9000,
        "[\0]",
    ],
)
def test_what_is_no_list_of_calls_is_shown(text):
    assert parse(PythonicParser(), text, 1000) == (text, [])


def test_calls_that_begin_with_a_special_token_are_found_and_it_is_no_text_otherwise(pytestconfig):
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(load_tokenizer(pytestconfig.rootpath / "configs" / "demo-model"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("[TOOL_CALLS]", special=True)]})
    ids = tokenizer('Well. [TOOL_CALLS]weather[ARGS]{"city": "Bonn"}')["input_ids"]
    assert tokenizer.convert_tokens_to_ids("[TOOL_CALLS]") in ids

    async def scenario():
        async with Site(tokenizer, lambda request: ids, template=MISTRAL, context=200) as demo:
            _, answer = await demo.post(PATH, BODY)
            chunks = [chunk["choices"][0] for chunk in await demo.stream(PATH, BODY)]
            _, plain = await demo.post(PATH, BODY | {"tool_choice": "none"})
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
        assert (choice["finish_reason"], choice["message"]["content"].strip()) == ("tool_calls", "Well.")
        (streamed,) = [chunk["delta"]["tool_calls"] for chunk in chunks if "tool_calls" in chunk["delta"]]
        assert streamed[0]["function"] == call["function"] and chunks[-1]["finish_reason"] == "tool_calls"
        assert "[TOOL_CALLS]" not in plain["choices"][0]["message"]["content"]

    asyncio.run(scenario())
