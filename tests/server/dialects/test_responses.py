"""OpenAI's Responses API, by hand: items, events in their order, and what is refused by name."""

import asyncio
import json

import pytest

PATH = "/v1/responses"
HERMES = (
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
THINKS = HERMES + "{# <think></think> #}"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
FUNCTION = [{"type": "function", "name": "f"}]
BODY = {"model": "demo", "input": "Hello", "max_output_tokens": 90}


def run(scenario):
    asyncio.run(scenario())


async def events(demo, body):
    answer = await demo.client.post(PATH, json=body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def plain(response):
    """A response's output without its random ids."""
    return [{name: v for name, v in item.items() if name not in ("id", "call_id")} for item in response["output"]]


def test_a_text_is_one_message(site):
    async def scenario():
        async with site("the sea was calm", context=200) as demo:
            _, answer = await demo.post(PATH, BODY | {"store": True, "metadata": {"a": "b"}})
        assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", False)
        assert answer["metadata"] == {"a": "b"} and answer["id"].startswith("resp_")
        (item,) = answer["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [
            {"type": "output_text", "text": "the sea was calm", "annotations": [], "logprobs": []}
        ]
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 2
        assert usage["output_tokens_details"] == {"reasoning_tokens": 0}

    run(scenario)


def test_a_text_cut_short_is_incomplete(site):
    async def scenario():
        async with site("the sea was calm", context=200) as demo:
            body = BODY | {"max_output_tokens": 2}
            _, answer = await demo.post(PATH, body)
            last = (await events(demo, body))[-1]
        assert answer["status"] == "incomplete" == answer["output"][0]["status"]
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["type"] == "response.incomplete" and plain(last["response"]) == plain(answer)

    run(scenario)


def test_a_stream_has_every_event_in_its_order(site):
    async def scenario():
        text = f"<think>hm</think>I look. {CALL}"
        async with site(text, template=THINKS, context=300) as demo:
            body = BODY | {"tools": TOOLS}
            _, whole = await demo.post(PATH, body)
            found = await events(demo, body)
        kinds = [event["type"].removeprefix("response.") for event in found]
        once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
        part = ["output_item.added", "content_part.added"]
        done = ["content_part.done", "output_item.done"]
        assert once == [
            *("created", "in_progress"),
            *(*part, "reasoning_text.delta", "reasoning_text.done", *done),
            *(*part, "output_text.delta", "output_text.done", *done),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]
        response = found[-1]["response"]
        assert plain(response) == plain(whole)
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        assert [e["output_index"] for e in found if e["type"].endswith("item.added")] == [0, 1, 2]
        assert [e["item"] for e in found if e["type"].endswith("item.done")] == response["output"]
        assert json.loads(response["output"][2]["arguments"]) == {"city": "Bonn"}
        assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        deltas = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
        assert deltas == response["output"][1]["content"][0]["text"]

    run(scenario)


def test_items_of_input_reach_the_template(site, tokenizer):
    async def scenario():
        items = [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Bonn"}'},
            {"type": "function_call_output", "call_id": "1", "output": "wet"},
        ]
        async with site(template=HERMES, context=300) as demo:
            status, answer = await demo.post(PATH, BODY | {"input": items, "instructions": "S", "tools": TOOLS})
        assert status == 200, answer
        prompt = tokenizer.decode(list(demo.runner.bound[0].prompt))
        assert prompt == "<tool_call>weather[system]S[system]D[user]Rain?[assistant]I look.<R>(Bonn)[tool]wet"

    run(scenario)


def test_a_schema_binds_the_text(site):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    async def scenario():
        async with site(context=200) as demo:
            form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
            _, answer = await demo.post(PATH, BODY | {"text": {"format": form}})
            _, refused = await demo.post(PATH, BODY | {"text": {"format": form | {"schema": "no"}}})
        assert demo.runner.bound[0].constraint is not None and answer["text"]["format"]["schema"] == schema
        assert refused["error"]["param"] == "text.format.schema"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": ""}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": "a " * 400}, "input"),
        ({"max_output_tokens": 190}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "input[0].content[0].type"),
        ({"tools": FUNCTION, "tool_choice": {"type": "function", "name": 5}}, "tool_choice"),
        (
            {"tools": FUNCTION, "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(site, check_error, fields, param):
    async def scenario():
        async with site(context=192) as demo:
            answer = await demo.client.post(PATH, json=BODY | fields)
        check_error(answer, 400, param)

    run(scenario)


@pytest.mark.parametrize(("value", "reason"), [(r'"\ud800"', "Unicode"), ("NaN", "finite")])
def test_what_the_response_could_not_repeat_is_refused(site, check_error, value, reason):
    async def scenario():
        async with site(context=192) as demo:
            body = f'{{"input": "x", "metadata": {{"a": {value}}}}}'
            answer = await demo.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
        assert reason in check_error(answer, 400)["message"]

    run(scenario)


def test_nothing_is_stored(site, check_error):
    async def scenario():
        async with site() as demo:
            for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel")):
                answer = await demo.client.request(method, f"{PATH}/{path}")
                assert "stores none" in check_error(answer, 404, "response_id")["message"]

    run(scenario)


def test_an_engine_that_fails_ends_the_stream_with_its_error(site):
    async def scenario():
        async with site(context=200) as demo:
            demo.runner.failure = RuntimeError("broken")
            last = (await events(demo, BODY))[-1]
        assert last["type"] == "response.failed" and "broken" in last["response"]["error"]["message"]

    run(scenario)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/score", "/pooling", "/v1/audio/transcriptions"])
def test_paths_of_other_servers_say_why_they_are_missing(site, path):
    async def scenario():
        async with site() as demo:
            status, answer = await demo.post(path, {})
        assert (
            status == 404 and answer["error"]["code"] == "unsupported_endpoint" and path in answer["error"]["message"]
        )

    run(scenario)
