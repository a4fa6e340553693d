"""Anthropic's Messages API, by its own client where it is installed, and by hand."""

import asyncio
import json

import pytest

PATH = "/v1/messages"
HERMES = (
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
TOOLS = [{"name": "weather", "description": "The weather", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
BODY = {"model": "demo", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}


def run(scenario):
    asyncio.run(scenario())


async def events(demo, body):
    answer = await demo.client.post(PATH, json=body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def test_an_answer_and_its_counts(site):
    async def scenario():
        async with site("the sea was calm") as demo:
            status, answer = await demo.post(PATH, BODY)
            _, counted = await demo.post(f"{PATH}/count_tokens", {"model": "demo", "messages": BODY["messages"]})
        assert status == 200 and answer["type"] == "message" and answer["role"] == "assistant"
        assert answer["content"] == [{"type": "text", "text": "the sea was calm"}]
        assert (answer["stop_reason"], answer["stop_sequence"], answer["model"]) == ("end_turn", None, "demo")
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"] > 0
        assert usage["output_tokens"] > 0

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["was", "calm"]}, "stop_sequence", "the sea "),
    ],
)
def test_why_it_ended(site, fields, reason, text):
    async def scenario():
        async with site("the sea was calm") as demo:
            _, answer = await demo.post(PATH, BODY | fields)
            stream = await events(demo, BODY | fields)
        assert answer["stop_reason"] == reason == stream[-2]["delta"]["stop_reason"]
        assert answer["stop_sequence"] == ("was" if reason == "stop_sequence" else None)
        assert text is None or answer["content"][0]["text"] == text

    run(scenario)


def test_a_stream_is_blocks_that_begin_grow_and_end(site):
    async def scenario():
        async with site(f"I look. {CALL}", template=HERMES, context=200) as demo:
            body = BODY | {"tools": TOOLS, "max_tokens": 90}
            _, whole = await demo.post(PATH, body)
            found = await events(demo, body)
        kinds = [event["type"] for event in found]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert [e["index"] for e in found if e["type"] == "content_block_start"] == [0, 1]
        assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1]
        text = "".join(e["delta"].get("text", "") for e in found if e["type"] == "content_block_delta")
        call = "".join(e["delta"].get("partial_json", "") for e in found if e["type"] == "content_block_delta")
        assert text.strip() == "I look." and json.loads(call) == {"city": "Bonn"}
        block = whole["content"][1]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Bonn"})
        assert whole["stop_reason"] == found[-2]["delta"]["stop_reason"] == "tool_use"

    run(scenario)


def test_results_of_tools_and_system_texts_reach_the_template(site, tokenizer):
    async def scenario():
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                          "content": [{"type": "text", "text": "wet"}]},
                                         {"type": "text", "text": "So?"}]},
        ]  # fmt: skip
        async with site("Yes", template=HERMES, context=200) as demo:
            status, _ = await demo.post(PATH, BODY | {"messages": messages, "tools": TOOLS, "system": "Be kind."})
            prompt = tokenizer.decode(demo.runner.bound[-1].prompt)
        assert status == 200
        assert prompt == "<tool_call>weather[system]Be kind.[user]Rain?[assistant](Bonn)[tool]wet[user]So?"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image' are not supported"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"temperature": 2}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
    ],
)
def test_refusals_are_in_its_form(site, fields, says):
    async def scenario():
        async with site() as demo:
            body = {name: value for name, value in (BODY | fields).items() if value is not None}
            status, answer = await demo.post(PATH, body)
        assert status == 400 and answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error" and says in answer["error"]["message"]

    run(scenario)


def test_the_key_may_come_alone(site):
    async def scenario():
        async with site(api_key="secret") as demo:
            good, _ = await demo.post(PATH, BODY, headers={"x-api-key": "secret"})
            bad, answer = await demo.post(PATH, BODY, headers={"x-api-key": "wrong"})
            missing = await demo.client.post(PATH, json=BODY | {"model": "other"}, headers={"x-api-key": "secret"})
        assert (good, bad, missing.status_code) == (200, 401, 404)
        assert answer["error"]["type"] == "authentication_error"
        assert missing.json()["error"]["type"] == "not_found_error"

    run(scenario)


def test_its_own_client(server, start_server, tmp_path):
    anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    own = start_server("--max-batch", "2", "--chat-template", template)
    with anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0) as client:
        model = own.facts.get("model") or "any"
        fields = {
            "max_tokens": 24,
            "messages": [{"role": "user", "content": "A story."}],
            "extra_body": {"temperature": 0},
        }
        fields["model"] = client.models.list().data[0].id if hasattr(client, "models") else model
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = client.messages.count_tokens(model=fields["model"], messages=fields["messages"])
    assert text == whole.content[0].text == final.content[0].text and final.stop_reason == whole.stop_reason
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == counted.input_tokens
    assert own.stop()[0] == 0


def test_more_messages_than_a_chat_completion_takes_are_refused(site):
    result = {"type": "tool_result", "tool_use_id": "1", "content": "wet"}

    async def scenario():
        async with site() as demo:
            messages = [{"role": "user", "content": [result, result]}] * 4000
            status, answer = await demo.post(PATH, BODY | {"messages": messages})
        assert status == 400 and answer["error"]["message"].startswith("messages")

    run(scenario)
