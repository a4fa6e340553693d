"""Before the application: bodies, keys, request ids, origins."""

import asyncio
import re

import pytest

from trirun_cli.server.http.guard import Guard

PATH = "/v1/completions"


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

    asyncio.run(scenario())


def test_the_key_guards_all_but_health_version_and_metrics(site, check_error):
    async def scenario():
        async with site(api_key="s3cret") as demo:
            for path in ("/health", "/version", "/metrics"):
                assert (await demo.client.get(path)).status_code == 200
            tries = [
                None,
                "s3cret",
                "Bearer",
                "Bearer wrong",
                "Bearer s3cret2",
                "Basic s3cret",
                "Bearer é",
                "Bearer S3CRET",
            ]
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

    asyncio.run(scenario())


def test_request_ids(site):
    async def scenario():
        async with site() as demo:
            given = await demo.client.get("/health", headers={"X-Request-Id": "abc-1"})
            assert given.headers["x-request-id"] == "abc-1"
            for bad in ("", "x" * 200, "with space"):
                answer = await demo.client.get("/nothing", headers={"X-Request-Id": bad})
                assert answer.headers["x-request-id"] != bad and len(answer.headers["x-request-id"]) == 32

    asyncio.run(scenario())


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

    asyncio.run(scenario())


def test_a_body_that_does_not_come_holds_nothing():
    sent = []

    async def application(scope, receive, send):
        raise AssertionError("never reached")

    async def scenario():
        waiting = asyncio.Event()

        async def send(message):
            sent.append(message)

        guard = Guard(application, max_body_bytes=100, body_s=0.05)
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"content-length", b"9")]}
        await asyncio.wait_for(guard(scope, waiting.wait, send), 10)

    asyncio.run(scenario())
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert b"did not come within 0.05 s" in sent[1]["body"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_the_tokens_and_times_of_a_request(site, caplog, stream):
    async def scenario():
        async with site("the sea was calm and on and on it went") as demo:
            body = {"prompt": [5] * 7, "max_tokens": 4, "n": 2, "stream": stream}
            answer = await demo.client.post(PATH, json=body, headers={"X-Request-Id": "r7"})
            assert answer.status_code == 200 and answer.headers["x-request-id"] == "r7"
            await demo.client.post(PATH, json={"prompt": "x", "n": 0})
            await demo.client.get("/health?key=s3cret%0a")

    with caplog.at_level("INFO", "trirun.requests"):
        asyncio.run(scenario())
    first, refused, health = [record.getMessage() for record in caplog.records if record.name == "trirun.requests"]
    pattern = r"\S+ POST /v1/completions 200 prompt=7 cached=\d generated=8 finish=length first=\d+ms total=\d+ms id=r7"
    assert re.fullmatch(pattern, first)
    assert re.fullmatch(r"\S+ POST /v1/completions 400 total=\d+ms id=\w+", refused)
    assert " GET /health 200 " in health and "s3cret" not in health


def test_the_log_has_a_client_that_left(site, caplog):
    async def scenario():
        async with site("word " * 40) as demo:
            demo.runner.go.clear()
            asking = asyncio.create_task(demo.post(PATH, {"prompt": [5] * 7}))
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            demo.runner.go.set()

    with caplog.at_level("INFO", "trirun.requests"):
        asyncio.run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trirun.requests"]
    assert " prompt=7 cached=0 generated=0 finish=abort total=" in line


def test_without_the_option_nothing_is_logged(site, caplog):
    async def scenario():
        async with site() as demo:
            await demo.post(PATH, {"prompt": "x"})

    # The server's own level: a library that another test imports may have set the root's.
    with caplog.at_level("WARNING", "trirun"):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if record.name == "trirun.requests"]
