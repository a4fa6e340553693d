"""``trirun finetune`` that is stopped, and continues: to the same bytes, with the same recipe, within the same time."""

import hashlib
import json
import signal
from types import SimpleNamespace

import pytest

from trirun_cli.workflows import finetune_publish

SMALL = ("--group-size", "64", "--seqlen", "64", "--batch", "4", "--held-out", "4", "--precision", "fp32")
OPTIONS = (*SMALL, "--init", "nearest", "--steps", "12", "--evaluations", "3")

pytestmark = pytest.mark.usefixtures("one_thread")


def digest(directory):
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def stop_after(monkeypatch, foreground):
    """Ctrl-C during a step: ``stop_after(5)``."""
    from trirun_gptq.train.loop import Training

    step = Training._step

    def arrange(number):
        def interrupted(self, module, done):
            if self.progress.step == number - 1:
                signal.raise_signal(signal.SIGINT)
            return step(self, module, done)

        monkeypatch.setattr(Training, "_step", interrupted)

    return arrange


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_bytes(trirun, plain_model, tmp_path, stop_after, monkeypatch):
    command = ("finetune", plain_model, *OPTIONS, "--generated", "4", "--rest-lr", "1e-4", "--out")
    assert trirun(*command, tmp_path / "whole")[0] == 0
    with monkeypatch.context():
        stop_after(6)
        code, _, err = trirun(*command, tmp_path / "F")
    assert code == 130 and "step 6: the state of the run is saved" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F.state", "whole"]
    stop_after(-1)
    code, _, err = trirun(*command, tmp_path / "F")
    assert code == 0 and "after step 6" in err
    assert digest(tmp_path / "F") == digest(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F", "whole"]


def test_a_second_run_to_the_same_place_leaves_the_first_alone(trirun, plain_model, tmp_path, stop_after, monkeypatch):
    from trirun_gptq.train.loop import Training

    command, step, second = ("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS), Training._step, []

    def another_begins(self, module, done):
        monkeypatch.setattr(Training, "_step", step)
        before = _bytes(tmp_path)
        second.append((*trirun(*command), _bytes(tmp_path) == before))
        return step(self, module, done)

    monkeypatch.setattr(Training, "_step", another_begins)
    assert trirun(*command)[0] == 0
    ((code, _, err, untouched),) = second
    assert code == 3 and "another run is writing" in err and untouched
    assert [path.name for path in tmp_path.iterdir()] == ["F"]


def _bytes(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_another_recipe_does_not_continue_a_stopped_run(trirun, plain_model, tmp_path, stop_after):
    stop_after(2)
    assert trirun("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS)[0] == 130
    code, _, err = trirun("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, "--lr", "0.001")
    assert code == 3 and "another run (different recipe)" in " ".join(err.split())
    assert "--overwrite removes that state; --no-resume starts over" in " ".join(err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["F.state"]
    before = (tmp_path / "F.state" / "state.json").read_bytes()
    assert trirun("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, "--lr", "0.001", "--overwrite")[0] == 130
    assert (tmp_path / "F.state" / "state.json").read_bytes() != before


@pytest.fixture
def ten_seconds_a_step(monkeypatch):
    """A clock that only steps of training move."""
    from trirun_gptq.train import loop

    from trirun_cli.commands import finetune
    from trirun_cli.workflows import finetune as finetune_model

    now, step = [1000.0], loop.Training._step

    def slow(self, module, done):
        now[0] += 10
        return step(self, module, done)

    for module in (loop, finetune_model, finetune_publish, finetune):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loop.Training, "_step", slow)


@pytest.mark.slow
def test_minutes_are_those_of_the_whole_run(trirun, plain_model, tmp_path, ten_seconds_a_step, stop_after):
    command = ("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, "--json", "--minutes")
    code, _, err = trirun(*command, "0.04")
    assert code == 3 and "leave nothing for training" in " ".join(err.split())
    stop_after(3)
    # The same run may be given more time than before.
    assert trirun(*command, "1")[0] == 130
    stop_after(-1)
    code, text, _ = trirun(*command, "2")
    assert code == 0
    document = json.loads(text)
    # Of 120 s, 3 are kept for the end, and a twelfth step would not have ended before them.
    assert document["steps"] == document["evaluations"][-1]["step"] == 11
    assert document["seconds"] == 110 and document["seconds_before"] == document["seconds_after"] == 0


@pytest.mark.slow
def test_a_damaged_state_is_an_error(trirun, plain_model, tmp_path, stop_after):
    stop_after(2)
    command = ("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS)
    assert trirun(*command)[0] == 130
    file = tmp_path / "F.state" / "training.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    stop_after(-1)
    code, _, err = trirun(*command)
    assert code == 3 and "damaged" in err
