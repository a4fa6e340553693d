"""The published examples of OpenAI's and Anthropic's clients, against a server process with a packed model."""

from __future__ import annotations

import json
from typing import Literal

import httpx
import numpy as np
import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")

# As Qwen's: tools, their calls and results, and the tags that their parser is chosen by.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MODEL = "tiny"


class Weather(BaseModel):
    """Structured output; its values are few, since the model's own text is of no sense and could go on for ever."""

    city: Literal["Paris", "Bonn"]
    sunny: bool


@pytest.fixture(scope="module")
def url(start_server, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--served-model-name", MODEL, "--chat-template", template)
    return start_server("--max-batch", "2", *options).url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Talk like a pirate."},
            {"role": "user", "content": "How do I check if a Python object is an instance of a class?"},
        ],
        max_completion_tokens=8,
        temperature=0,
    )
    assert completion.choices[0].message.role == "assistant" and completion.usage.completion_tokens > 0


def test_a_chat_that_streams(client):
    messages = [{"role": "user", "content": "Hello"}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True, seed=1, max_tokens=8)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    # The helper takes a text that is cut short for an error, so this one must end by itself.
    with client.chat.completions.stream(model=MODEL, messages=messages, response_format=Weather) as again:
        assert isinstance(again.get_final_completion().choices[0].message.parsed, Weather)


def test_a_chat_parsed_with_pydantic(client):
    completion = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Weather?"}], response_format=Weather
    )
    assert isinstance(completion.choices[0].message.parsed, Weather)


def test_a_round_trip_of_tools(client):
    tools = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    completion = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Bonn")
    messages.append(completion.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "14 degrees"})
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=4)
    assert final.choices[0].finish_reason in ("stop", "length")


def test_a_response(client):
    response = client.responses.create(
        model=MODEL,
        instructions="You are a coding assistant.",
        input="Is an object a class?",
        max_output_tokens=8,
        temperature=0,
    )
    assert response.output_text and response.usage.output_tokens > 0
    assert (response.status, response.store) == ("incomplete", False)


def test_a_response_that_streams(client):
    stream = client.responses.create(model=MODEL, input="Hello", stream=True, max_output_tokens=8, temperature=0)
    events = list(stream)
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].response.output_text == "".join(deltas) != ""


def test_a_response_parsed_with_pydantic(client):
    response = client.responses.parse(model=MODEL, input="Weather?", text_format=Weather)
    assert isinstance(response.output_parsed, Weather)
    with client.responses.stream(model=MODEL, input="Weather?", text_format=Weather) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather) and final.output_text == text


def test_a_response_with_tools(client):
    tools = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    response = client.responses.create(
        model=MODEL, input=items, tools=tools, tool_choice={"type": "function", "name": "get_weather"}
    )
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Bonn")
    items += response.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "14 degrees"})
    again = client.responses.create(model=MODEL, input=items, tools=tools, max_output_tokens=4)
    assert again.status in ("completed", "incomplete")


def test_what_is_stored_elsewhere_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="stores none"):
        client.responses.retrieve("resp_123")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_123")


def test_anthropics_messages(url):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        hello = [{"role": "user", "content": "Hello, Claude"}]
        message = client.messages.create(max_tokens=8, messages=hello, model=MODEL)
        assert message.content[0].text and message.stop_reason == "max_tokens"
        with client.messages.stream(max_tokens=8, messages=hello, model=MODEL) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().content[0].text == text != ""
        tools = [{"name": "get_weather", "description": "The weather", "input_schema": PARAMETERS}]
        choice = {"type": "tool", "name": "get_weather"}
        message = client.messages.create(max_tokens=400, messages=hello, model=MODEL, tools=tools, tool_choice=choice)
        call = next(block for block in message.content if block.type == "tool_use")
        assert call.input["city"] in ("Paris", "Bonn") and message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "14 degrees"}
        turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        again = client.messages.create(max_tokens=4, messages=hello + turns, model=MODEL, tools=tools)
        assert again.stop_reason in ("end_turn", "max_tokens")


def test_embeddings(client):
    """It sends base64 where nothing is asked for, and decodes it."""
    texts = ["The ship was in the harbour.", "The boat lay in the port.", "He ate an apple."]
    whole = client.embeddings.create(model=MODEL, input=texts)
    vectors = np.array([each.embedding for each in whole.data])
    assert [each.index for each in whole.data] == [0, 1, 2] and whole.usage.prompt_tokens > 12
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    floats = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float")
    assert np.allclose(floats.data[0].embedding, vectors[0], atol=1e-6)
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=8).data[0].embedding
    assert len(short) == 8 and np.allclose(short, vectors[0][:8] / np.linalg.norm(vectors[0][:8]), atol=1e-5)
    mean = client.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": "mean"})
    mean = np.array([each.embedding for each in mean.data])
    # Two sentences of the same are nearer to each other than to a third.
    assert mean[0] @ mean[1] > mean[0] @ mean[2]
    assert not np.allclose(mean[0], vectors[0], atol=1e-2)


def test_texts_and_their_tokens_are_the_same(client, url):
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "a calm sea"}).json()["tokens"]
    found = [client.embeddings.create(model=MODEL, input=given).data[0].embedding for given in ("a calm sea", ids)]
    assert found[0] == found[1]


def test_more_texts_than_slots_and_queue(client):
    texts = [f"text number {i}" for i in range(40)]
    together = client.embeddings.create(model=MODEL, input=texts).data
    alone = [client.embeddings.create(model=MODEL, input=texts[i]).data[0].embedding for i in (0, 17, 39)]
    assert [together[i].embedding for i in (0, 17, 39)] == alone
