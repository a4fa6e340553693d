"""What the command line names as models: folders, names, clashes, and what is refused before anything is loaded."""

from pathlib import Path

import pytest

from trirun_cli.errors import InputError, UsageError
from trirun_cli.server.pool.sources import model_sources


def model(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return path


def test_directories_are_named_after_themselves_or_as_asked(tmp_path) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    assert model_sources([a, b]) == [(["a"], a), (["b"], b)]
    assert model_sources([Path(f"small={a}"), b]) == [(["small"], a), (["b"], b)]
    assert model_sources([a, b], ["x", "y"]) == [(["x"], a), (["y"], b)]
    assert model_sources([a], ["x", "y"]) == [(["x", "y"], a)]
    # A directory may have the sign in its own name.
    odd = model(tmp_path / "c=d")
    assert model_sources([odd]) == [(["c=d"], odd)]


def test_a_folder_stands_for_the_models_in_it(tmp_path) -> None:
    a, b = model(tmp_path / "all" / "a"), model(tmp_path / "all" / "b")
    (tmp_path / "all" / "logs").mkdir()
    assert model_sources([tmp_path / "all"]) == [(["a"], a), (["b"], b)]
    with pytest.raises(UsageError, match="folder of 2 models has no single name"):
        model_sources([Path(f"x={tmp_path / 'all'}")])


def test_what_is_refused(tmp_path) -> None:
    a, twin = model(tmp_path / "a"), model(tmp_path / "other" / "a")
    with pytest.raises(UsageError, match="two models have the name 'a'"):
        model_sources([a, twin])
    with pytest.raises(UsageError, match="given 1 times for 2 models"):
        model_sources([a, Path(f"b={twin}")], ["x"])
    with pytest.raises(InputError, match="nothing: no such directory"):
        model_sources([a, tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty is not a model directory: it has no config\.json"):
        model_sources([a, tmp_path / "empty"])
    with pytest.raises(UsageError, match="needs a name"):
        model_sources([Path("=x")])


def test_the_command_refuses_by_name(tmp_path, trirun) -> None:
    a, b = model(tmp_path / "a"), model(tmp_path / "b")
    for options, said in (
        (("--backend", "vllm"), "--backend vllm serves one model, and 2 are given"),
        (("--max-models", 0), "--max-models 0: at least 1"),
        (("--idle-unload", 0), "--idle-unload 0: seconds above 0"),
        (("--preload", "some"), "--preload some: first or all"),
        (("--preload", "all", "--max-models", 1), "--preload all: 2 models, and --max-models 1"),
        (("--checkpoint", a), "both given"),
    ):
        code, _, err = trirun("serve", a, b, *options)
        assert code == 2 and said in " ".join(err.split())
    code, _, err = trirun("serve", a, tmp_path / "nothing")
    assert code == 3 and "nothing: no such directory" in " ".join(err.split())
