"""Fields of vLLM's that change what is generated, or how an answer is written."""

import asyncio

import numpy as np
import pytest

from trirun_cli.engine.constraint import Only, Without, mask_words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def allowed(constraint, vocab=70):
    words = np.zeros(mask_words(vocab), np.uint32)
    constraint.fill(words)
    return {token for token in range(vocab) if words[token // 32] >> np.uint32(token % 32) & 1}


def test_only_some_tokens():
    assert allowed(Only([3, 33, 69, 3], 70, None)) == {3, 33, 69}
    assert allowed(Only([3, 33], 70, Only([33, 34], 70, None))) == {33}


def test_runs_of_tokens_are_kept_out():
    constraint = Without([[5], [7, 8], [7, 9, 69]], Only(range(5, 70), 70, None))
    everything = set(range(5, 70))
    assert allowed(constraint) == everything - {5}
    constraint.advance(7)
    assert allowed(constraint) == everything - {5, 8}
    constraint.advance(9)
    assert allowed(constraint) == everything - {5, 69}
    constraint.advance(9)
    assert allowed(constraint) == everything - {5}


def test_prompt_logprobs_have_vllms_form(site):
    """The scripted model's are −(id % 7) − 0.5, the alternatives the ids after it."""

    async def scenario():
        async with site() as demo:
            body = {"prompt": [5, 9, 20], "max_tokens": 2, "prompt_logprobs": 2}
            _, found = await demo.post(COMPLETIONS, body)
            first, second, third = found["choices"][0]["prompt_logprobs"]
            assert first is None and list(second) == ["9", "10"] and list(third) == ["20", "21"]
            assert second["9"] == {
                "logprob": -2.5,
                "rank": 1,
                "decoded_token": demo.model.tokenizer.token_text(9),
            }
            _, alone = await demo.post(COMPLETIONS, body | {"prompt_logprobs": 0})
            assert alone["choices"][0]["prompt_logprobs"][1]["9"]["rank"] is None
            _, chat = await demo.post(CHAT, {"messages": HELLO, "max_tokens": 2, "prompt_logprobs": 1})
            assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
            _, plain = await demo.post(CHAT, {"messages": HELLO, "max_tokens": 2})
            assert "prompt_logprobs" not in plain

    asyncio.run(scenario())


def test_special_tokens_are_text_where_that_is_asked(site, tokenizer):
    ids = [0, *tokenizer("the sea", add_special_tokens=False)["input_ids"]]

    async def scenario():
        async with site(lambda request: ids) as demo:
            body = {"prompt": "x", "ignore_eos": True, "max_tokens": len(ids)}
            texts = []
            for skip in (True, False):
                _, found = await demo.post(COMPLETIONS, body | {"skip_special_tokens": skip})
                texts.append(found["choices"][0]["text"])
            assert texts == ["the sea", "<|endoftext|>the sea"]

    asyncio.run(scenario())


def test_prompts_are_truncated_to_their_last_tokens(site):
    async def scenario():
        async with site() as demo:
            await demo.post(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 1, "truncate_prompt_tokens": 2})
            await demo.post(COMPLETIONS, {"prompt": [5] * 90, "max_tokens": 1, "truncate_prompt_tokens": -1})
            long = {"prompt": "word " * 5000, "max_tokens": 1, "truncate_prompt_tokens": 3}
            assert (await demo.post(COMPLETIONS, long))[0] == 200
            await demo.post(CHAT, {"messages": HELLO, "max_tokens": 1, "truncate_prompt_tokens": 4})
            assert [len(request.prompt) for request in demo.runner.bound] == [2, 63, 3, 4]
            assert demo.runner.bound[0].prompt == (6, 7)

    asyncio.run(scenario())


def test_reasoning_can_be_left_out(site):
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"

    async def scenario():
        async with site("<think>hm</think>Yes", template=template) as demo:
            for include in (True, False):
                body = {"messages": HELLO, "include_reasoning": include}
                _, found = await demo.post(CHAT, body)
                message = found["choices"][0]["message"]
                assert (message["content"], message["reasoning_content"]) == ("Yes", "hm" if include else None)
                parts = await demo.stream(CHAT, body)
                texts = [part["choices"][0]["delta"].get("reasoning_content", "") for part in parts]
                assert "".join(texts) == ("hm" if include else "")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
    ],
)
def test_refusals_name_the_field(site, check_error, body, param):
    async def scenario():
        async with site() as demo:
            check_error(await demo.client.post(COMPLETIONS, json={"prompt": "x"} | body), 400, param)

    asyncio.run(scenario())
