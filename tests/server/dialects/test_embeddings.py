"""/v1/embeddings: the numbers, the fields, the errors; OpenAI's client is in test_clients."""

import asyncio
import base64
import struct

import pytest

PATH = "/v1/embeddings"


def test_the_numbers_are_pooled_as_asked(site):
    """The scripted model's states are [token, 1, 2, 3]."""

    async def scenario():
        async with site() as demo:
            body = {"input": [[5, 7, 9]], "normalize": False}
            for pooling, first in (("mean", 7), ("last", 9)):
                _, found = await demo.post(PATH, body | {"pooling": pooling})
                assert found["data"] == [{"object": "embedding", "index": 0, "embedding": [first, 1, 2, 3]}]
            _, coded = await demo.post(PATH, body | {"pooling": "mean", "encoding_format": "base64"})
            assert struct.unpack("<4f", base64.b64decode(coded["data"][0]["embedding"])) == (7, 1, 2, 3)
            assert coded["usage"] == {"prompt_tokens": 3, "total_tokens": 3} and coded["model"] == "demo"
            _, default = await demo.post(PATH, body)
            assert default["data"][0]["embedding"][0] == 9
            await demo.idle()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", ""),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": [[100_000_000]]}, "input", "outside the model's vocabulary"),
        ({"input": "word " * 100}, "input", "the context"),
        ({"input": "x", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "x", "dimensions": 5}, "dimensions", "the model has 4"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "x", "pooling": "max"}, "pooling", ""),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ],
)
def test_refusals_name_the_field(site, check_error, body, param, words):
    async def scenario():
        async with site() as demo:
            answer = await demo.client.post(PATH, json=body)
            assert words in check_error(answer, 400, param)["message"]

    asyncio.run(scenario())


def test_what_gives_no_states_says_so(site, check_error):
    async def scenario():
        async with site() as demo:
            demo.engine.has_states = False
            error = check_error(await demo.client.post(PATH, json={"input": "x"}), 501)
            assert error["code"] == "unsupported_endpoint" and "scripted gives no hidden states" in error["message"]

    asyncio.run(scenario())


def test_a_failing_engine_and_a_full_queue_are_errors(site, check_error):
    async def scenario():
        async with site(slots=1, max_waiting=0) as demo:
            demo.runner.go.clear()
            first = asyncio.ensure_future(demo.client.post(PATH, json={"input": ["x", "y"]}))
            await asyncio.sleep(0.1)
            assert check_error(await demo.client.post(PATH, json={"input": "x"}), 429)["code"] == "queue_full"
            demo.runner.failure = RuntimeError("no more")
            demo.runner.go.set()
            assert "no more" in check_error(await first, 500)["message"]

    asyncio.run(scenario())
