"""Structured output through a real server: every answer is what was asked for, by OpenAI's client."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from trirun_cli.text.grammar import GrammarCompiler

pytest.importorskip("llguidance", reason="needs trirun[serve]")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """What SCHEMA describes."""

    name: str
    age: int
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, **fields):
    made = {"model": client.models.list().data[0].id, "prompt": "A person:", "max_tokens": 200, "temperature": 0.9}
    return client.completions.create(**made | fields).choices[0]


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["response_format", "structured_outputs", "guided_json", "guided_json as text"])
def test_an_answer_follows_its_schema(client, how, seed):
    extra = {
        "response_format": {"response_format": of_schema(SCHEMA)},
        "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
        "guided_json": {"guided_json": SCHEMA},
        "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    }[how]
    choice = complete(client, seed=seed, extra_body=extra)
    assert choice.finish_reason == "stop"
    person = Person.model_validate_json(choice.text, strict=True)
    assert 0 <= person.age <= 120 and len(person.name) <= 20


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"guided_regex": r"[a-f]{4}-[0-9]{2}"}, re.compile("[a-f]{4}-[0-9]{2}").fullmatch),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, re.compile("(yes|no)!").fullmatch),
        ({"guided_choice": ["the moon", "the sun", 'a "word"']}, {"the moon", "the sun", 'a "word"'}.__contains__),
        ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}.__contains__),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+ "."'}, re.compile(r"a[bc]+\.").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{1,6}/ "y"'}}, re.compile("x[0-9]+y").fullmatch),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_answer_matches_its_grammar(client, field, matches):
    choice = complete(client, seed=1, temperature=0.3, extra_body=field)
    assert choice.finish_reason == "stop" and matches(choice.text), choice.text


def test_any_json_object(client, server):
    # A weak model's strings never end; this makes it prefer what closes them.
    found = httpx.post(f"{server.url}/tokenize", json={"prompt": '"}', "add_special_tokens": False}).json()["tokens"]
    bias = {str(token): 20 for token in found}
    for seed in range(4):
        choice = complete(client, seed=seed, logit_bias=bias, extra_body={"response_format": {"type": "json_object"}})
        assert choice.finish_reason == "stop" and isinstance(json.loads(choice.text), dict), choice.text


def test_twelve_at_once_with_and_without_grammars(client):
    """What one answer must be changes no other."""

    def ask(seed):
        extra = {"guided_json": SCHEMA} if seed % 2 else {}
        return complete(client, seed=seed, max_tokens=80, extra_body=extra).text

    alone = [ask(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_a_stream_is_the_same_answer(client):
    fields = {"seed": 3, "extra_body": {"guided_json": SCHEMA}}
    whole = complete(client, **fields).text
    model = client.models.list().data[0].id
    pieces = client.completions.create(
        model=model, prompt="A person:", max_tokens=200, temperature=0.9, stream=True, **fields
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_log_probabilities_are_those_of_the_model(client):
    """As without a grammar: one that leaves a single choice does not make it certain."""
    choice = complete(client, temperature=0, logprobs=1, extra_body={"guided_choice": ["zebra crossing"]})
    assert choice.text == "zebra crossing" and max(choice.logprobs.token_logprobs[:2]) < -0.01


@pytest.mark.parametrize(
    ("field", "param", "says"),
    [
        ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "not"),
        ({"guided_json": "{"}, "guided_json", "Expecting"),
        ({"guided_json": [1]}, "guided_json", "JSON schema"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_grammar": "start: undefined"}, "guided_grammar", "undefined"),
        ({"guided_grammar": 'root ::= "a" ['}, "guided_grammar", "end of input"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object", "exclude"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held_is_refused_by_name(client, field, param, says):
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, extra_body=field)
    assert error.value.param == param and says in error.value.message


def test_a_model_without_tokens_for_a_grammar_says_so(site, tokenizer, check_error):
    async def run():
        made = site()
        made.model = replace(made.model, grammars=GrammarCompiler(tokenizer.backend_tokenizer, 8192, set()))
        async with made as served:
            return await served.client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a+"})

    answer = asyncio.run(run())
    assert "the model has none" in check_error(answer, 400, "guided_regex")["message"]


def test_deep_schemas_are_refused(client):
    schema = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(openai.BadRequestError, match="levels deep"):
        complete(client, extra_body={"guided_json": schema})


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "forecast")
]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %} Answer in <tool_call> tags.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


@pytest.fixture(scope="module")
def chat_client(start_server, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(TEMPLATE)
    server = start_server("--max-batch", "4", "--chat-template", template)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
        assert server.stop()[0] == 0


@pytest.fixture(scope="module")
def chat(chat_client):
    made = {
        "model": chat_client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Rain?"}],
        "max_tokens": 200,
        "seed": 5,
    }
    return lambda **fields: chat_client.chat.completions.create(**made | fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}])
def test_a_forced_call_is_one_of_its_tools(chat, choice, stream):
    found = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        assert not any(delta.content for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    else:
        assert found.choices[0].finish_reason == "tool_calls" and not found.choices[0].message.content
        (call,) = found.choices[0].message.tool_calls
    assert call.function.name in (("weather", "forecast") if choice == "required" else ("forecast",))
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Bonn") and arguments["days"] <= 9 and len(arguments) == 2


def test_strict_tools_leave_the_model_free_to_answer(chat):
    """Only a call must keep to the schema; without one the text is the same as without tools to keep to."""
    loose = [{**tool, "function": tool["function"] | {"strict": False}} for tool in TOOLS]
    free, strict = (chat(tools=tools, temperature=0, max_tokens=30).choices[0] for tools in (loose, TOOLS))
    # The template shows the tools, and one word of them differs.
    assert strict.message.content and free.message.content


def test_a_model_of_pydantic_is_parsed(chat_client):
    found = chat_client.chat.completions.parse(
        model=chat_client.models.list().data[0].id,
        messages=[{"role": "user", "content": "A person."}],
        response_format=Person,
        seed=2,
        max_tokens=300,
        temperature=0.9,
    )
    assert found.choices[0].message.parsed.colour in ("red", "green")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool 'x'",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "exclude",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_choices_of_tools_that_are_none(chat, fields, param, says):
    with pytest.raises(openai.BadRequestError) as error:
        chat(**fields)
    assert error.value.param == param and says in error.value.message


def test_words_and_tokens_in_a_real_model(server):
    """Greedy: ``bad_words`` keeps the model's own words out, and only ``allowed_token_ids`` come."""

    def ask(**body):
        made = {"prompt": "The ship was in the", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        return httpx.post(f"{server.url}/v1/completions", json=made | body, timeout=60).json()["choices"][0]

    free = ask()
    word = free["text"].split()[0]
    without = ask(bad_words=[word])
    assert word not in without["text"].split() and without["text"] != free["text"]
    ids = sorted(set(free["token_ids"]))[:4]
    only = ask(allowed_token_ids=ids)
    assert set(only["token_ids"]) <= set(ids) and len(only["token_ids"]) == 12
