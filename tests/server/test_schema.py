"""Fields that are wrong, unsupported or unknown."""

import asyncio
import json

import pytest

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("n", True),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("seed", 2**80),
        ("stop", ""),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", 5),
        ("stop", "\ud800"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"cat": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"999999999": 1}),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop_token_ids", [-1]),
        ("best_of", 3),
        ("suffix", "the end"),
        ("min_tokens", 17),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**30]),
        ("prompt", {"text": "x"}),
        ("prompt", "\ud800"),
    ],
)
def test_bad_fields_are_named(site, check_error, field, value):
    async def scenario():
        async with site() as demo:
            body = json.dumps({"prompt": "x"} | {field: value})
            answer = await demo.client.post(PATH, content=body, headers={"Content-Type": "application/json"})
            assert check_error(answer, 400, field)["type"] == "invalid_request_error"
            assert demo.runner.bound == []

    asyncio.run(scenario())


def test_what_cannot_fit_is_refused(site, check_error):
    async def scenario():
        async with site() as demo:
            long = await demo.client.post(PATH, json={"prompt": [5] * 64, "max_tokens": 1})
            assert check_error(long, 400, "prompt")["code"] == "context_length_exceeded"
            both = await demo.client.post(PATH, json={"prompt": [5] * 40, "max_tokens": 30})
            told = check_error(both, 400, "max_tokens")["message"]
            assert "64 tokens (--ctx of the server); the request needs 70" in told
            text = await demo.client.post(PATH, json={"prompt": "word " * 500_000})
            assert check_error(text, 400, "prompt")["code"] == "context_length_exceeded"
            fits = await demo.client.post(PATH, json={"prompt": [5] * 60})
            assert fits.status_code == 200 and demo.runner.bound[0].params.max_tokens == 4

    asyncio.run(scenario())


def test_unknown_fields_are_ignored_with_one_warning(site, caplog):
    async def scenario():
        async with site() as demo:
            for _ in range(2):
                body = {"prompt": "x", "frobnicate": 1, "wibble": 2, "user": "me", "suffix": None}
                status, _ = await demo.post(PATH, body)
                assert status == 200

    with caplog.at_level("WARNING", "trirun.server"):
        asyncio.run(scenario())
    assert ["'frobnicate', 'wibble'" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.slow
def test_absurd_sizes_are_refused_before_they_cost_anything(site, check_error):
    many = 250_000

    async def scenario():
        async with site() as demo:
            for field, value, param in (
                ("prompt", [[1]] * (many // 2), "prompt"),
                ("prompt", [1] * many, "prompt"),
                ("prompt", ["a"] * 4097, "prompt"),
                ("prompt", "word " * many, "prompt"),
                ("logit_bias", {str(i): 1 for i in range(2000)}, "logit_bias"),
                ("messages", [{"role": "user", "content": "x"}] * 5000, "messages"),
            ):
                path = "/v1/chat/completions" if field == "messages" else PATH
                answer = await demo.client.post(path, json={"prompt": "x"} | {field: value})
                check_error(answer, 400, param)
            extra = {f"field{i}": i for i in range(101)}
            check_error(await demo.client.post(PATH, json={"prompt": "x"} | extra), 400)

    asyncio.run(scenario())
