"""Null is absent, for every field of the schema; harmless fields are accepted; the rest of the table is refused."""

import asyncio
import typing
from dataclasses import replace

import httpx
import pytest
from pydantic import BaseModel

from trirun_cli.server.bodies.openai import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from trirun_cli.server.bodies.other_fields import OTHER_FIELDS

openai = pytest.importorskip("openai", reason="needs trirun[dev]")

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}{{ reasoning_effort }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "weather"}}
# The least body of each endpoint, and one with an object at every place that may have one.
BODIES = {
    "/v1/completions": (CompletionBody, {"prompt": "x"}),
    CHAT: (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}


def models_within(annotation):
    """The models that a field's value is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_within(part)]


def optional_fields(model):
    # One of prompt and messages is required of /tokenize.
    required = {"prompt"} if model is TokenizeBody else set()
    return [name for name, field in model.model_fields.items() if not field.is_required() and name not in required]


def nulls():
    """(path, body with one null more) for every field that is not required, at any depth of the schema."""
    for path, (model, least) in BODIES.items():
        yield from ((path, least | {name: None}) for name in optional_fields(model))
        yield from ((path, least | {name: None}) for name in OTHER_FIELDS if model in (CompletionBody, ChatBody))
    chat, message = BODIES[CHAT][1], {"role": "user", "content": "x"}
    # What openai's own messages and tools have besides, where a program sends them back.
    for name in ("refusal", "annotations", "audio", "function_call", "tool_calls", "name", "reasoning_content"):
        yield CHAT, chat | {"messages": [message | {name: None}]}
    for name in ("description", "parameters", "strict"):
        yield CHAT, chat | {"tools": [{"type": "function", "function": {"name": "weather", name: None}}]}
    yield CHAT, chat | {"tools": [TOOL | {"defer_loading": None}]}


def test_null_is_the_same_as_absent_for_every_field(site):
    seen = {path: 0 for path in BODIES}

    async def scenario():
        async with site("the sea", template=TEMPLATE) as demo:

            async def answer(path, body):
                status, document = await demo.post(path, body)
                assert status == 200, (path, body, document)
                kept = {name: document.get(name) for name in ("tokens", "count", "prompt", "choices")}
                if not demo.runner.bound:
                    return kept
                request = demo.runner.bound[-1]
                return kept, request.prompt, replace(request.params, seed=0), request.stop_ids

            for path, body in nulls():
                absent = {name: value for name, value in body.items() if value is not None}
                # A null inside a message or a tool: these have none in the least body.
                absent = BODIES[path][1] if absent == body else absent
                assert await answer(path, body) == await answer(path, absent), body
                seen[path] += 1
            status, _ = await demo.post("/v1/completions", {"prompt": "x", "stream_options": None, "stream": None})
            assert status == 200
            events = await demo.stream("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": None}})
            assert events[-1]["choices"]

    asyncio.run(scenario())
    assert seen["/v1/completions"] > 50 and seen[CHAT] > 50 and seen["/tokenize"] and seen["/detokenize"]


def test_every_model_of_the_schema_takes_null_as_absent():
    found, todo = set(), [model for model, _ in BODIES.values()]
    while todo:
        model = todo.pop()
        found.add(model)
        todo += [m for field in model.model_fields.values() for m in models_within(field.annotation) if m not in found]
    assert len(found) >= 7 and all(issubclass(model, Body) for model in found)


def test_a_required_field_must_not_be_null(site, check_error):
    async def scenario():
        async with site() as demo:
            for path, body, param in (
                ("/v1/completions", {"prompt": None}, "prompt"),
                (CHAT, {"messages": None}, "messages"),
                (CHAT, {"messages": [{"role": None}]}, "messages[0].role"),
                ("/tokenize", {"prompt": None}, "prompt"),
                ("/detokenize", {"tokens": None}, "tokens"),
            ):
                check_error(await demo.client.post(path, json=body), 400, param)

    asyncio.run(scenario())


HARMLESS = {
    "store": True,
    "metadata": {"run": "7"},
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": "30m"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "prediction": {"type": "content", "content": "the sea"},
    "verbosity": "low",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "modalities": ["text"],
    "response_format": {"type": "text"},
}


def test_openais_harmless_fields_are_accepted_without_a_warning(site, caplog):
    async def scenario():
        async with site() as demo:
            for field, value in HARMLESS.items():
                for path in ("/v1/completions", CHAT):
                    least = BODIES["/v1/completions"][1] if path != CHAT else {"messages": BODIES[CHAT][1]["messages"]}
                    status, document = await demo.post(path, least | {field: value})
                    assert status == 200, (field, document)

    with caplog.at_level("WARNING", "trirun.server"):
        asyncio.run(scenario())
    assert not caplog.records


def test_every_field_that_is_not_harmless_is_refused_with_its_reason(site, check_error):
    refused = {name: rule for name, rule in OTHER_FIELDS.items() if rule.values is not None}

    async def scenario():
        async with site() as demo:
            for name, rule in refused.items():
                body = {"prompt": "x"}
                for value in rule.values:
                    assert (await demo.post("/v1/completions", body | {name: value}))[0] == 200
                answer = await demo.client.post("/v1/completions", json=body | {name: {"something": "else"}})
                error = check_error(answer, 400, name)
                assert error["code"] == "unsupported_parameter" and rule.reason in error["message"]

    asyncio.run(scenario())
    assert all(rule.reason for rule in OTHER_FIELDS.values()) and len(refused) > 15


def test_every_parameter_of_openais_client_is_known(site, caplog):
    """Whatever the installed client can send is acted on, accepted or refused, never ignored as unknown."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    for params, model in ((completion_create_params, CompletionBody), (chat_params, ChatBody)):
        sent = set(typing.get_type_hints(params.CompletionCreateParamsNonStreaming))
        assert sent - set(model.model_fields) <= set(OTHER_FIELDS)


def test_what_the_client_adds_by_itself_is_accepted(site, caplog):
    async def scenario():
        async with site("Good day", template=TEMPLATE) as demo:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(demo.app))
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
            messages = [{"role": "user", "content": "Hello"}]
            whole = await client.chat.completions.create(model="demo", messages=messages)
            # An answer as the client holds it, with all its nulls, is the next request's history.
            messages += [whole.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
            again = await client.chat.completions.create(model="demo", messages=messages, stop=None, n=None)
            assert again.choices[0].message.content == "Good day"
            async with client.chat.completions.stream(model="demo", messages=messages) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "Good day"
            parsed = await client.chat.completions.parse(model="demo", messages=messages)
            assert parsed.choices[0].message.content == "Good day"

    with caplog.at_level("WARNING", "trirun.server"):
        asyncio.run(scenario())
    assert not caplog.records


def test_reasoning_effort_reaches_the_template(site, tokenizer):
    async def scenario():
        async with site(template=TEMPLATE) as demo:
            body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"}
            await demo.post(CHAT, body)
            await demo.post(CHAT, body | {"chat_template_kwargs": {"reasoning_effort": "low"}})
            seen = [tokenizer.decode(list(request.prompt)) for request in demo.runner.bound]
            assert seen == ["high[user]x", "low[user]x"]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_there_is_one(site, stream):
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

    async def scenario():
        async with site(call * 3, template=TEMPLATE, context=256) as demo:
            body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
            for parallel, count in ((True, 3), (False, 1)):
                asked = body | {"parallel_tool_calls": parallel}
                if stream:
                    choices = [choice for event in await demo.stream(CHAT, asked) for choice in event["choices"]]
                    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
                else:
                    choices = (await demo.post(CHAT, asked))[1]["choices"]
                    calls = choices[0]["message"]["tool_calls"]
                assert len(calls) == count and choices[-1]["finish_reason"] == "tool_calls"

    asyncio.run(scenario())
