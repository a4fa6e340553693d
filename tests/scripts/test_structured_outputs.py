"""The script that follows instances of JSON schemas token by token."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("llguidance", reason="needs trirun[serve]")


def test_counts_what_is_compiled_refused_and_wrong(pytestconfig, tmp_path):
    number = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    lines = [
        # The second instance is valid, and said not to be: it must be counted as let through.
        {
            "name": "a",
            "schema": number,
            "tests": [{"valid": True, "data": {"a": 1}}, {"valid": False, "data": {"a": 2}}],
        },
        {"name": "b", "schema": number, "tests": [{"valid": False, "data": {"a": "x"}}]},
        {"name": "c", "schema": number, "tests": [{"valid": True, "data": {"b": 1}}]},
        {"name": "d", "schema": {"not": {}}, "tests": []},
    ]
    schemas = tmp_path / "schemas.jsonl"
    schemas.write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = pytestconfig.rootpath
    script = [sys.executable, root / "scripts" / "structured_outputs.py", root / "configs" / "demo-model"]
    done = subprocess.run([*script, schemas, "--json"], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)["libraries"]
    counts = {name: found[name] for name in ("compiled", "refused", "wrong", "let through", "cut off")}
    assert counts == {"compiled": 3, "refused": 1, "wrong": 2, "let through": 1, "cut off": 1}
    assert found["mask_us"]["p50"] > 0 and found["refusals"]
