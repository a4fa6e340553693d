"""Everything around the completions: errors, keys, limits, health, metrics, and requests that do not hurt others."""

import asyncio
import json

import pytest

PATH = "/v1/completions"


def run(coroutine):
    return asyncio.run(coroutine)


def check_error(answer, status, param=None):
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["param"] == param
    return error


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
        ("min_tokens", 5),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", [10**30]),
        ("prompt", {"text": "x"}),
    ],
)
def test_bad_fields_are_named(site, field, value):
    async def scenario():
        async with site() as demo:
            answer = await demo.client.post(PATH, json={"prompt": "x"} | {field: value})
            assert check_error(answer, 400, field)["type"] == "invalid_request_error"
            assert demo.runner.bound == []

    run(scenario())


def test_what_cannot_fit_is_refused(site):
    async def scenario():
        async with site() as demo:
            long = await demo.client.post(PATH, json={"prompt": [5] * 64, "max_tokens": 1})
            assert check_error(long, 400, "prompt")["code"] == "context_length_exceeded"
            both = await demo.client.post(PATH, json={"prompt": [5] * 40, "max_tokens": 30})
            assert "64 tokens; the request needs 70" in check_error(both, 400, "max_tokens")["message"]
            text = await demo.client.post(PATH, json={"prompt": "word " * 1_000_000})
            assert check_error(text, 400, "prompt")["code"] == "context_length_exceeded"
            fits = await demo.client.post(PATH, json={"prompt": [5] * 60})
            assert fits.status_code == 200 and demo.runner.bound[0].params.max_tokens == 4

    run(scenario())


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b"\xff\xfe\x00", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b"[1, 2]", "application/json", 400),
        (b'"prompt"', "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "x"}', "nonsense", 415),
        (b'{"prompt": "' + b"x" * 3_000_000 + b'"}', "application/json", 413),
    ],
)
def test_bad_bodies(site, content, kind, status):
    async def scenario():
        async with site(max_body_bytes=2**20) as demo:
            answer = await demo.client.post(PATH, content=content, headers={"Content-Type": kind})
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
            assert (await demo.client.post(PATH, json={"prompt": "x"})).status_code == 200

    run(scenario())


def test_unknown_fields_are_ignored_with_one_warning(site, caplog):
    async def scenario():
        async with site() as demo:
            for _ in range(2):
                status, _ = await demo.post(PATH, {"prompt": "x", "frobnicate": 1, "user": "me", "suffix": None})
                assert status == 200

    with caplog.at_level("WARNING", "trirun.server"):
        run(scenario())
    assert [record.getMessage().count("'frobnicate'") for record in caplog.records] == [1]


def test_routes_that_are_not_there(site):
    async def scenario():
        async with site() as demo:
            check_error(await demo.client.get("/v1/nothing"), 404)
            check_error(await demo.client.get(PATH), 405)
            check_error(await demo.client.post("/v1/models"), 405)
            error = check_error(await demo.client.post(PATH, json={"prompt": "x", "model": "gpt-5"}), 404, "model")
            assert error["code"] == "model_not_found"
            check_error(await demo.client.get("/v1/models/other"), 404, "model")

    run(scenario())


def test_models(site):
    async def scenario():
        async with site() as demo:
            listed = (await demo.client.get("/v1/models")).json()
            assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["demo", "alias"]
            assert listed["data"][1]["root"] == "demo" and listed["data"][0]["max_model_len"] == 64
            assert (await demo.client.get("/v1/models/alias")).json()["id"] == "alias"
            assert "version" in (await demo.client.get("/version")).json()

    run(scenario())


def test_the_key_guards_all_but_health_version_and_metrics(site):
    async def scenario():
        async with site(api_key="s3cret") as demo:
            for path in ("/health", "/version", "/metrics"):
                assert (await demo.client.get(path)).status_code == 200
            tries = [None, "s3cret", "Bearer", "Bearer wrong", "Bearer s3cret2", "Basic s3cret", "Bearer é", "Bearer S3CRET"]
            for given in tries:
                headers = {} if given is None else {"Authorization": given.encode()}
                for path in ("/v1/models", "/v1/nothing", "/docs"):
                    answer = await demo.client.get(path, headers=headers)
                    assert check_error(answer, 401)["type"] == "authentication_error"
                    assert answer.headers["www-authenticate"] == "Bearer" and "x-request-id" in answer.headers
                answer = await demo.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
                check_error(answer, 401)
            for given in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret"):
                answer = await demo.client.get("/v1/models", headers={"Authorization": given})
                assert answer.status_code == 200

    run(scenario())


def test_request_ids(site):
    async def scenario():
        async with site() as demo:
            given = await demo.client.get("/health", headers={"X-Request-Id": "abc-1"})
            assert given.headers["x-request-id"] == "abc-1"
            for bad in ("", "x" * 200, "with space"):
                answer = await demo.client.get("/nothing", headers={"X-Request-Id": bad})
                assert answer.headers["x-request-id"] != bad and len(answer.headers["x-request-id"]) == 32

    run(scenario())


def test_browsers_of_named_origins_only(site):
    async def scenario():
        ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        async with site(api_key="k", cors_origins=["https://app.example"]) as demo:
            preflight = await demo.client.options(PATH, headers=ask)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == "https://app.example"
            other = await demo.client.options(PATH, headers=ask | {"Origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
            refused = await demo.client.post(PATH, json={}, headers={"Origin": "https://app.example"})
            assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        async with site() as demo:
            assert (await demo.client.options(PATH, headers=ask)).status_code == 405

    run(scenario())


def test_tokenize_and_back(site, tokenizer):
    async def scenario():
        async with site() as demo:
            _, there = await demo.post("/tokenize", {"prompt": "naïve 日本"})
            assert there["tokens"] == tokenizer("naïve 日本")["input_ids"] and there["count"] == len(there["tokens"])
            _, back = await demo.post("/detokenize", {"tokens": there["tokens"]})
            assert back == {"prompt": "naïve 日本"}
            check_error(await demo.client.post("/detokenize", json={"tokens": [10**9]}), 400, "tokens")

    run(scenario())


def test_loading_draining_and_dead(site, tokenizer):
    from trirun_cli.server.app import create_app
    from trirun_cli.server.service import Service

    async def scenario():
        import httpx

        app = create_app(Service(["demo"]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert check_error(await client.get("/health"), 503)["code"] == "loading"
            answer = await client.post(PATH, json={"prompt": "x"})
            assert check_error(answer, 503)["code"] == "loading" and int(answer.headers["retry-after"]) > 0
            check_error(await client.get("/v1/models"), 503)
            assert (await client.get("/metrics")).status_code == 200
        async with site() as demo:
            assert (await demo.client.get("/health")).json() == {"status": "ok"}
            demo.service.draining = True
            assert check_error(await demo.client.get("/health"), 503)["code"] == "draining"
            check_error(await demo.client.post(PATH, json={"prompt": "x"}), 503)

    run(scenario())


def test_a_failed_engine_answers_500_and_is_unhealthy(site):
    async def scenario():
        async with site() as demo:
            demo.runner.go.clear()
            plain = asyncio.create_task(demo.client.post(PATH, json={"prompt": "x"}))
            streamed = asyncio.create_task(demo.client.post(PATH, json={"prompt": "y", "stream": True}))
            await asyncio.sleep(0.1)
            demo.runner.failure = RuntimeError("the device is gone")
            demo.runner.go.set()
            assert "the device is gone" in check_error(await plain, 500)["message"]
            text = (await streamed).text
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert json.loads(events[-2])["error"]["type"] == "server_error" and events[-1] == "[DONE]"
            assert check_error(await demo.client.get("/health"), 503)["code"] == "dead"
            assert check_error(await demo.client.post(PATH, json={"prompt": "x"}), 500)["code"] == "engine_dead"

    run(scenario())


def test_a_full_queue_is_429_and_all_or_nothing(site):
    async def scenario():
        async with site(slots=1, max_waiting=2) as demo:
            demo.runner.go.clear()
            held = [asyncio.create_task(demo.post(PATH, {"prompt": "x"})) for _ in range(2)]
            await asyncio.sleep(0.1)
            # Two of three choices would find no place, so none is taken.
            full = await demo.client.post(PATH, json={"prompt": "x", "n": 3})
            assert check_error(full, 429)["type"] == "rate_limit_error" and int(full.headers["retry-after"]) > 0
            never = await demo.client.post(PATH, json={"prompt": "x", "n": 4})
            assert "never takes more than 3" in check_error(never, 400, "n")["message"]
            demo.runner.go.set()
            assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
            await demo.idle()
            assert len(demo.runner.bound) == 2
            status, _ = await demo.post(PATH, {"prompt": "x", "n": 3})
            assert status == 200

    run(scenario())


def test_metrics(site):
    async def scenario():
        async with site() as demo:
            await demo.post(PATH, {"prompt": "The sea", "n": 2})
            await demo.stream(PATH, {"prompt": "The sea", "max_tokens": 2})
            text = (await demo.client.get("/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            label = '{model_name="demo"}'
            assert float(values[f"trirun:num_requests_running{label}"]) == 0
            assert float(values[f"trirun:kv_cache_usage_perc{label}"]) == 0
            prompt = len(demo.runner.bound[0].prompt)
            assert float(values[f"trirun:prompt_tokens_total{label}"]) == 3 * prompt
            assert float(values[f"trirun:generation_tokens_total{label}"]) >= 2
            assert float(values[f"trirun:time_to_first_token_seconds_count{label}"]) == 3
            assert float(values[f"trirun:e2e_request_latency_seconds_count{label}"]) == 3
            assert float(values['trirun:request_success_total{finished_reason="length",model_name="demo"}']) == 1
            assert "trirun:inter_token_latency_seconds_bucket" in text and "trirun:num_requests_waiting" in text

    run(scenario())


def test_a_defect_is_a_500_and_hurts_nobody_else(site, monkeypatch, caplog):
    async def scenario():
        async with site() as demo:
            monkeypatch.setattr(demo.service, "complete", None)
            answer = await demo.client.post(PATH, json={"prompt": "x"}, headers={"X-Request-Id": "r1"})
            assert check_error(answer, 500)["code"] == "internal_error" and answer.headers["x-request-id"] == "r1"
            assert (await demo.client.get("/health")).status_code == 200

    run(scenario())
    assert "request r1 failed" in caplog.text
