"""The log: a line or a JSON document per request, with its id."""

import asyncio
import json
import logging

import pytest

from trirun_cli.server.operations import logs

PATH = "/v1/completions"


@pytest.fixture
def written(capsys):
    """Set up logging, and afterwards leave it as it was: ``written(format)``; the lines by ``written.lines()``."""
    names = ("trirun", "uvicorn", "trirun.requests", "trirun.server")
    before = [(name, logging.getLogger(name)) for name in names]
    kept = [(logger, logger.handlers, logger.propagate, logger.level) for _, logger in before]

    class Written:
        def __call__(self, log_format):
            logs.set_up_logging(True, log_format)

        def lines(self):
            return capsys.readouterr().err.splitlines()

    yield Written()
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def asked(site, **headers):
    async def scenario():
        async with site() as demo:
            await demo.client.post(PATH, json={"prompt": "x", "max_tokens": 3}, headers=headers)
            await demo.client.get("/nothing?key=secret")

    asyncio.run(scenario())


def test_a_request_is_one_json_document_with_its_numbers_and_its_id(site, written):
    written("json")
    asked(site, **{"X-Request-Id": "abc-1"})
    first, second = map(json.loads, written.lines())
    assert first["level"] == "info" and first["logger"] == "trirun.requests" and first["time"].endswith("+00:00")
    expected = {"method": "POST", "path": PATH, "status": 200, "generated": 3, "finish": ["length"], "id": "abc-1"}
    assert {name: first[name] for name in expected} == expected
    assert first["prompt"] > 0 and first["first_ms"] <= first["total_ms"]
    assert (second["status"], second["path"], "prompt" in second) == (404, "/nothing", False)


def test_the_same_as_text(site, written):
    written("text")
    asked(site, **{"X-Request-Id": "abc-1"})
    first, second = written.lines()
    assert " INFO " in first and f"POST {PATH} 200 prompt=" in first
    assert "generated=3 finish=length first=" in first and first.endswith("id=abc-1")
    assert "GET /nothing 404 total=" in second and "secret" not in second


def test_other_records_and_exceptions_are_documents_too(written):
    written("json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("trirun.server").exception("it %s", "failed")
    (line,) = written.lines()
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("error", "it failed") and "ValueError: two" in found["exception"]
