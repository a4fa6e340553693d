"""GPT-OSS' channels: reasoning, answer and calls, across any borders of a stream."""

import json

import pytest

from trirun_cli.text.harmony import ChannelParser, HarmonyParser

THOUGHT = "<|channel|>analysis<|message|>Let me < see.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>It is <|one|>."
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bonn"}'
OTHER = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": [1, {"b": 2}]}<|call|>'


def parse(text, size):
    channels, tools = ChannelParser(), HarmonyParser()
    reasoning, content, calls = "", "", []

    def take(found):
        nonlocal reasoning, content, calls
        thought, answer = found
        more, made = tools.feed(answer)
        reasoning, content, calls = reasoning + thought, content + more, calls + made

    for i in range(0, len(text), size):
        take(channels.feed(text[i : i + size]))
    take(channels.flush())
    more, made = tools.flush()
    named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls + made]
    assert [call["index"] for call in calls + made] == list(range(len(named)))
    return reasoning, content + more, named


WEATHER, F = ("get_weather", {"city": "Bonn"}), ("f", {"a": [1, {"b": 2}]})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + ANSWER, ("Let me < see.", "It is <|one|>.", [])),
        (ANSWER.removeprefix("<|start|>assistant"), ("", "It is <|one|>.", [])),
        (THOUGHT + CALL, ("Let me < see.", "", [WEATHER])),
        (THOUGHT + OTHER + CALL, ("Let me < see.", "", [F, WEATHER])),
        (
            "<|channel|>commentary<|message|>I look it up.<|end|>" + OTHER + ANSWER,
            ("", "I look it up.It is <|one|>.", [F]),
        ),
        (THOUGHT + "<|start|>assistant<|channel|>fin", ("Let me < see.", "", [])),
        ("<|channel|>analysis<|message|>cut off <|en", ("cut off <|en", "", [])),
        ("Plain <text", ("", "Plain <text", [])),
        ('{"name": "f", "arguments": {}}', ("", "", [("f", {})])),
        (CALL.replace("}", ""), ("", None, [])),
        (CALL.replace("functions.get_weather", "browser.search"), ("", None, [])),
    ],
)
def test_split(text, expected, size):
    reasoning, content, calls = parse(text, size)
    assert (reasoning, calls) == (expected[0], expected[2])
    if expected[1] is None:
        # A call of nothing that the request offers, or broken, stays to be seen.
        assert "<|message|>" in content and "Bonn" in content
    else:
        assert content == expected[1]
