"""Requests that schemathesis makes of the server's own OpenAPI document, to a real server. Package: schemathesis."""

import subprocess
import sys

import httpx
import pytest

KEY = "a-key"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--api-key", KEY)], ids=["open", "key"])
def test_every_answer_is_one_that_the_document_has(start_server, tmp_path, options):
    pytest.importorskip("schemathesis")
    server = start_server("--max-batch", "4", "--max-waiting", "64", *options)
    header = ["--header", f"Authorization: Bearer {KEY}"] if options else []
    # What fits no field of a model, such as a token id that it has not, is in no schema.
    checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    many = ["--phases", "coverage,fuzzing,stateful", "--max-examples", "100", "--seed", "1", "--continue-on-failure"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *checks, *many, *header]
    found = subprocess.run([*command, "--no-color"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stdout
    assert "14/14" in found.stdout
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"} and server.idle()
    if options:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 401
