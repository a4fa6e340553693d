"""The scripts that measure the server and its grammars, on a small model and for a moment."""

import importlib
import json

import pytest

from trirun_cli.workflows.pack import pack

pytest.importorskip("llguidance", reason="needs trirun[serve]")


@pytest.fixture
def run(repo_root, monkeypatch, capsys):
    """The JSON document of a script: ``run(name, *arguments)``."""

    def call(name, *arguments):
        monkeypatch.syspath_prepend(str(repo_root / "scripts"))
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments), "--json"])
        importlib.import_module(name).main()
        return json.loads(capsys.readouterr().out)

    return call


def test_with_a_grammar_and_without(run, packed):
    one, two = run("bench_constrained", packed, "--batch", "1,2", "--tokens", 6, "--rounds", 2, "--device", "cpu")
    assert (one["batch"], two["batch"]) == (1, 2) and "cpu" in one["engine"]
    assert one["least"] <= one["ratio"] <= one["most"] and one["plain"] > 0


def test_answers_are_held_against_their_schemas(run, packed, tmp_path, monkeypatch):
    pytest.importorskip("jsonschema")
    schemas = tmp_path / "schemas.jsonl"
    lines = [{"name": "a", "schema": {"enum": ["x", 5]}}, {"name": "b", "schema": {"not": {}}}]
    schemas.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run("structured_answers", packed, schemas, "--each", 2, "--tokens", 20)
    assert (found["schemas"], found["answered"], found["invalid"]) == (1, 1, 0) and found["ended"] == {"stop": 2}
    answers = importlib.import_module("structured_answers")
    assert answers.fault_of("6", {"enum": ["x", 5]}) and answers.fault_of("{", {})
    assert answers.fault_of("5", {"enum": ["x", 5]}) is None


@pytest.mark.slow
def test_all_kinds_of_clients(run, repo_root, tmp_path):
    source = repo_root.parent / "shared" / "models" / "bookshelf-28m-ternary"
    if not source.is_dir():
        pytest.skip("needs the reference model, of a context for the long prompts")
    pack(source, tmp_path / "checkpoint")
    found = run("server_mix", tmp_path / "checkpoint", "--clients", 8, "--seconds", 1, "--plain", 1)
    assert found["faults"] == 0 and found["idle_afterwards"], found["first_faults"]
    assert sum(found["mixed"]["requests"].values()) >= 8 and found["mixed"]["between_ms"]["p99"] > 0
    assert found["hostile"]["requests"]
