"""Models by their names on the hub: from the hub's cache, in its own layout, without a network."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from trirun_cli.checkpoint.hub import HubName, hub_name, local_model, model_name
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.console import Console
from trirun_cli.errors import InputError, TrirunError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch, demo_model):
    """A cache that holds some-org/demo-model, offline, in an empty working directory."""
    root = tmp_path / "hub" / "models--some-org--demo-model"
    shutil.copytree(demo_model, root / "snapshots" / COMMIT)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return root / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("meta-llama/Llama-2-7b-hf", HubName("meta-llama/Llama-2-7b-hf")),
        ("org/name.v1@main", HubName("org/name.v1", "main")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:TQ2_0", HubName("org/name", None, "TQ2_0")),
        ("org/name@v1:sub/a.gguf", HubName("org/name", "v1", "sub/a.gguf")),
        ("name", None),
        ("/org/name", None),
        ("./a/b/c", None),
        ("../name", None),
        ("~/name", None),
        ("org/na me", None),
    ],
)
def test_names_of_the_hub(given, found, cache):
    assert hub_name(Path(given)) == found


def test_what_exists_here_is_meant(cache):
    Path("some-org").mkdir()
    assert hub_name(Path("some-org/demo-model")) is None, "a misspelt directory is not asked for on the hub"
    assert local_model(Path("some-org/demo-model"), Console()) == Path("some-org/demo-model")
    assert model_name(Path("some-org")) == "some-org" and model_name(Path("../work")) == "work"


@pytest.mark.parametrize("given", ["some-org/demo-model", "some-org/demo-model@main", f"some-org/demo-model@{COMMIT}"])
def test_a_name_becomes_the_directory_in_the_cache(given, cache):
    assert local_model(Path(given), Console(quiet=True)) == cache
    assert model_name(Path(given)) == "demo-model"
    assert ModelDir.open(given).path == cache


@pytest.mark.slow
def test_commands_take_names_and_call_what_they_make_by_them(trirun, cache):
    code, _, err = trirun("quantize", "some-org/demo-model", "--preset", "fast", "--dry-run", "--samples", "9")
    assert code == 0, err
    assert "taking it from the Hugging Face hub" in err and "demo-model-2bit" in err
    code, out, err = trirun("generate", "-c", "some-org/demo-model", "-p", "The sea", "--max-tokens", "2", "-q")
    assert code == 0 and out.startswith("The sea"), err
    code, out, err = trirun("eval", "-m", "some-org/demo-model", "--limit", "1", "--window", "16", "-q")
    assert code == 0, err


@pytest.mark.parametrize(
    "command",
    [("generate", "-p", "x", "-c"), ("quantize",), ("serve", "-c"), ("eval", "-m"), ("inspect",), ("verify",)],
)
def test_a_name_that_is_not_to_be_had_is_one_line(trirun, cache, command):
    code, out, err = trirun(*command, "some-org/other")
    assert code == 3 and out == "" and "some-org/other: no such directory, nor in the hub's cache" in err


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        (errors.GatedRepoError, InputError, "a gated model"),
        (errors.RepositoryNotFoundError, InputError, "no such model on the hub"),
        (errors.RevisionNotFoundError, InputError, "no such revision"),
        (errors.HfHubHTTPError, TrirunError, "the hub answers: 503"),
    ],
)
def test_answers_of_the_hub(monkeypatch, cache, kind, expected, words):
    def refuse(*_, **__):
        raise kind.__new__(kind, "503") if kind is not errors.HfHubHTTPError else Unavailable("503")

    class Unavailable(errors.HfHubHTTPError):
        def __init__(self, message):
            Exception.__init__(self, message)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(expected, match=words):
        local_model(Path("some-org/other"), Console(quiet=True))
