"""Tool calls: told to the template, found in what the model writes, whole and streamed."""

import asyncio
import json

import pytest

from trirun_cli.text.tool_calls import for_template
from trirun_cli.text.tool_parsers import HermesParser, JsonParser

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
HERMES = (
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


def parse(parser, parts):
    content, calls = "", []
    for part in parts:
        more, made = parser.feed(part)
        content, calls = content + more, calls + made
        assert "<tool_c" not in more
    rest, made = parser.flush()
    return content + rest, [
        (c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls + made
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_tags_across_any_borders(size):
    text = f"I look. {CALL}\n{CALL} a < b"
    content, calls = parse(HermesParser(), pieces(text, size))
    assert content.split() == ["I", "look.", "a", "<", "b"]
    assert calls == [(0, "weather", {"city": "Köln"}), (1, "weather", {"city": "Köln"})]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("text", ["", "a < b, <tool is no call", "plain\n\ntext\n", "ends with <tool_cal"])
def test_text_without_calls_stays_as_it_is(text, size):
    parser = HermesParser()
    content = "".join(parser.feed(part)[0] for part in pieces(text, size))
    assert content + parser.flush()[0] == text


def test_what_is_no_call_is_shown():
    whole = ("not json", '{"arguments": {}}', '{"name": 3}', '["name"]', '{"name": "f", "arguments": 5}')
    # Python reads these; in a response they would be no JSON, or no Unicode.
    unread = (
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\ud800"}',
    )
    for inside in whole + unread:
        parser = HermesParser()
        content, calls = parser.feed(f"<tool_call>{inside}</tool_call>")
        assert content == f"<tool_call>{inside}</tool_call>" and calls == []
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f"') == ("", []) and parser.flush() == ('<tool_call>{"name": "f"', [])


def test_the_closing_tag_may_be_missing():
    assert parse(HermesParser(), ['<tool_call>{"name": "f", "arguments": {}}']) == ("", [(0, "f", {})])


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_bare_json(size):
    text = '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}'
    assert parse(JsonParser(), pieces(text, size)) == ("", [(0, "f", {"x": 1}), (1, "g", {})])
    for plain in ("No { here", '{"x": 1}', '{"name": "f"} and more', "{"):
        assert parse(JsonParser(), pieces(plain, size)) == (plain, [])


def test_earlier_calls_reach_the_template_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"function": {"name": "f", "arguments": "{"}}
    messages = for_template([{"role": "assistant", "tool_calls": [call, broken, 5]}, {"role": "user", "content": "x"}])
    assert messages[0]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"x": 1}}}, broken, 5]
    assert call["function"]["arguments"] == '{"x": 1}' and messages[1] == {"role": "user", "content": "x"}


def test_a_conversation_with_tools(site, tokenizer):
    async def scenario():
        async with site(f"Wait. {CALL}", template=HERMES, context=256) as demo:
            body = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS}
            status, answer = await demo.post(PATH, body)
            assert status == 200
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Wait. "
            (call,) = choice["message"]["tool_calls"]
            assert set(call) == {"id", "type", "function"} and call["id"].startswith("call_")
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
            assert tokenizer.decode(list(demo.runner.bound[0].prompt)) == "<tool_call>weather[user]Rain?"

            chunks = [chunk["choices"][0] for chunk in await demo.stream(PATH, body)]
            assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Wait. "
            (streamed,) = [chunk["delta"]["tool_calls"] for chunk in chunks if "tool_calls" in chunk["delta"]]
            assert streamed[0]["index"] == 0 and streamed[0]["function"] == call["function"]
            assert chunks[-1]["finish_reason"] == "tool_calls"

            messages = [*body["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "dry"})
            status, _ = await demo.post(PATH, body | {"messages": messages})
            seen = tokenizer.decode(list(demo.runner.bound[2].prompt))
            assert status == 200 and seen == "<tool_call>weather[user]Rain?[assistant](Köln)[tool]dry"

            _, plain = await demo.post(PATH, body | {"tool_choice": "none"})
            message = plain["choices"][0]["message"]
            assert "tool_calls" not in message and CALL in message["content"]
            assert "weather" not in tokenizer.decode(list(demo.runner.bound[3].prompt))

    asyncio.run(scenario())


def test_calls_too_long_for_the_context_are_refused_before_they_are_tokenized(site):
    function = {"name": "weather", "arguments": json.dumps({"city": "x" * 1_000_000})}
    call = {"id": "c", "type": "function", "function": function}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "x"}]

    async def scenario():
        async with site(template=HERMES) as demo:
            status, answer = await demo.post(PATH, {"messages": messages, "tools": TOOLS})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
            assert answer["error"]["param"] == "messages" and "characters" in answer["error"]["message"]

    asyncio.run(scenario())
