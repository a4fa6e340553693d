"""POST /v1/chat/completions."""

import asyncio

import pytest

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_a_conversation_goes_through_the_template(site, tokenizer):
    async def scenario():
        async with site("Good day") as demo:
            messages = [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            ]
            status, answer = await demo.post(PATH, {"model": "alias", "messages": messages})
            assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "alias"
            (choice,) = answer["choices"]
            assert choice["message"] == {"role": "assistant", "content": "Good day", "refusal": None}
            assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
            seen = tokenizer.decode(list(demo.runner.bound[0].prompt))
            assert seen == "[system]Be kind.\n[user]Hello\n[assistant]"
            # Without a limit, whatever fits.
            assert demo.runner.bound[0].params.max_tokens == 64 - len(demo.runner.bound[0].prompt)

    asyncio.run(scenario())


def test_streamed(site):
    async def scenario():
        async with site("Good day, 日本") as demo:
            body = {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}}
            chunks = await demo.stream(PATH, body)
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
            for index in range(2):
                mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"].get("content", "") for c in mine) == "Good day, 日本"
                assert [c["finish_reason"] for c in mine][-1] == "stop"
                assert all(c["finish_reason"] is None for c in mine[:-1])

    asyncio.run(scenario())


def test_logprobs(site, tokenizer):
    ids = tokenizer("Good 🙂")["input_ids"]

    async def scenario():
        async with site("Good 🙂") as demo:
            _, answer = await demo.post(PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 3})
            content = answer["choices"][0]["logprobs"]["content"]
            assert [entry["logprob"] for entry in content] == [-(token % 7) - 0.5 for token in ids]
            assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Good 🙂"
            assert all(len(entry["top_logprobs"]) == 3 for entry in content)
            assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
            _, bare = await demo.post(PATH, {"messages": HELLO, "logprobs": True})
            assert all(entry["top_logprobs"] == [] for entry in bare["choices"][0]["logprobs"]["content"])

    asyncio.run(scenario())


def test_max_completion_tokens_and_its_older_name(site):
    async def scenario():
        async with site("one two three four") as demo:
            await demo.post(PATH, {"messages": HELLO, "max_tokens": 2})
            await demo.post(PATH, {"messages": HELLO, "max_completion_tokens": 3, "max_tokens": 2})
            assert [request.params.max_tokens for request in demo.runner.bound] == [2, 3]

    asyncio.run(scenario())


def test_the_templates_own_options(site, tokenizer):
    async def scenario():
        template = "{{ mood }}:{{ messages[-1].content }}{% if add_generation_prompt %}!{% endif %}"
        async with site(template=template) as demo:
            body = {"messages": HELLO, "chat_template_kwargs": {"mood": "kind"}}
            await demo.post(PATH, body)
            await demo.post(PATH, body | {"add_generation_prompt": False})
            await demo.post(PATH, body | {"continue_final_message": True})
            seen = [tokenizer.decode(list(request.prompt)) for request in demo.runner.bound]
            assert seen == ["kind:Hello!", "kind:Hello", "kind:Hello"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"messages": [{"role": "bad", "content": "x"}]}, "messages", "no such role"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "knows nothing of tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"chat_template_kwargs": {"tools": []}}, "messages", "template"),
    ],
)
def test_refusals_name_the_field(site, change, param, words):
    async def scenario():
        async with site() as demo:
            status, answer = await demo.post(PATH, {"messages": HELLO} | change)
            assert status == 400 and answer["error"]["param"] == param
            assert words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"

    asyncio.run(scenario())


def test_a_model_without_a_template_says_what_to_do(site):
    async def scenario():
        async with site(template=None) as demo:
            status, answer = await demo.post(PATH, {"messages": HELLO})
            assert status == 400 and "/v1/completions" in answer["error"]["message"]

    asyncio.run(scenario())


def test_a_tokenizer_with_several_templates(site, tokenizer):
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}<tool_call>"}

    async def scenario():
        async with site(template=templates) as demo:
            tools = [{"type": "function", "function": {"name": "weather"}}]
            for body in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
                status, answer = await demo.post(PATH, {"messages": HELLO} | body)
                assert status == 200, answer
            seen = [tokenizer.decode(list(request.prompt)) for request in demo.runner.bound]
            assert seen == ["Hello", "weather<tool_call>", "Hello"]

    asyncio.run(scenario())


THINKING = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}{{ '<think>\n' if thinks else '' }}"


def test_reasoning_is_apart_from_the_answer(site):
    async def scenario():
        async with site("hm, so</think>\n\nYes.", template=THINKING, context=200) as demo:
            body = {"messages": HELLO, "chat_template_kwargs": {"thinks": True}}
            _, whole = await demo.post(PATH, body)
            chunks = await demo.stream(PATH, body)
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == ("hm, so", "Yes.")
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "hm, so"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        async with site("<think>a</think>b", template=THINKING, context=200) as demo:
            _, own = await demo.post(PATH, {"messages": HELLO})
        assert own["choices"][0]["message"]["content"].strip() == "b"
        async with site("<think>a</think>b", context=200) as demo:
            _, plain = await demo.post(PATH, {"messages": HELLO})
        assert "<think>" in plain["choices"][0]["message"]["content"]
        assert "reasoning_content" not in plain["choices"][0]["message"]

    asyncio.run(scenario())
