"""/v1/embeddings: OpenAI's client, the fields, the errors."""

import asyncio
import base64
import struct

import httpx
import numpy as np
import pytest

openai = pytest.importorskip("openai")

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client(client):
    """It sends base64 where nothing is asked for, and decodes it."""
    model = client.models.list().data[0].id
    texts = ["The ship was in the harbour.", "The boat lay in the port.", "He ate an apple."]
    whole = client.embeddings.create(model=model, input=texts)
    vectors = np.array([each.embedding for each in whole.data])
    assert [each.index for each in whole.data] == [0, 1, 2] and whole.usage.prompt_tokens > 12
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float")
    assert np.allclose(floats.data[0].embedding, vectors[0], atol=1e-6)
    short = client.embeddings.create(model=model, input=texts[0], dimensions=8).data[0].embedding
    assert len(short) == 8 and np.allclose(short, vectors[0][:8] / np.linalg.norm(vectors[0][:8]), atol=1e-5)
    mean = client.embeddings.create(model=model, input=texts, extra_body={"pooling": "mean"})
    mean = np.array([each.embedding for each in mean.data])
    # Two sentences of the same are nearer to each other than to a third.
    assert mean[0] @ mean[1] > mean[0] @ mean[2]
    assert not np.allclose(mean[0], vectors[0], atol=1e-2)


def test_texts_and_their_tokens_are_the_same(client, server):
    model = client.models.list().data[0].id
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "a calm sea"}).json()["tokens"]
    found = [client.embeddings.create(model=model, input=given).data[0].embedding for given in ("a calm sea", ids)]
    assert found[0] == found[1]


def test_more_texts_than_slots_and_queue(client):
    model = client.models.list().data[0].id
    texts = [f"text number {i}" for i in range(40)]
    together = client.embeddings.create(model=model, input=texts).data
    alone = [client.embeddings.create(model=model, input=texts[i]).data[0].embedding for i in (0, 17, 39)]
    assert [together[i].embedding for i in (0, 17, 39)] == alone


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
