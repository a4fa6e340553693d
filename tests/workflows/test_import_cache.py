"""Several runs that need the same model of a foreign format at once: one packs it, the others wait and use it."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.checkpoint.formats.gguf_writer import DATA
from tests.interrupts import sigint_handled_by
from tests.told import Told
from trirun_cli.errors import InputError
from trirun_cli.workflows import import_cache
from trirun_cli.workflows import pack as packing

WAITING = """
import sys
from pathlib import Path
from trirun_cli.commands.app import main
sys.argv = ["trirun", "generate", sys.argv[1], "--prompt", "one", "-n", "2", "--device", "cpu"]
main()
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A GGUF file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes((DATA / "tiny-qwen3-TQ2_0.gguf").read_bytes())
    return path


@pytest.fixture
def held(monkeypatch):
    """``pack`` as it is, but that it goes on only once ``held.set()`` is called; ``held.begun``, ``held.runs``."""
    real, go_on = packing.pack, threading.Event()
    go_on.begun, go_on.runs, go_on.failure = threading.Event(), 0, None

    def slow(*arguments, **settings):
        go_on.runs += 1
        go_on.begun.set()
        assert go_on.wait(60)
        if go_on.failure is not None and go_on.runs == 1:
            raise go_on.failure
        return real(*arguments, **settings)

    monkeypatch.setattr(packing, "pack", slow)
    return go_on


def test_a_second_run_waits_and_uses_what_the_first_packed(model, held):
    first, second = Told(), Told()
    with ThreadPoolExecutor() as threads:
        one = threads.submit(import_cache.as_model_dir, model, first)
        assert held.begun.wait(60)
        two = threads.submit(import_cache.as_model_dir, model, second)
        assert second.spoke.wait(60) and not two.done()
        held.set()
        packed = one.result()
        assert two.result() == packed and (packed / "config.json").is_file()
    assert held.runs == 1
    assert [note.split()[0] for note in first.notes] == ["packing"]
    assert [note.split()[0] for note in second.notes] == ["waiting"]
    assert [path.name for path in import_cache.cache_dir().iterdir()] == [packed.name]


def test_where_the_first_run_fails_the_second_packs(model, held):
    held.failure = InputError("the disk of the first run is gone")
    second = Told()
    with ThreadPoolExecutor() as threads:
        one = threads.submit(import_cache.as_model_dir, model)
        assert held.begun.wait(60)
        two = threads.submit(import_cache.as_model_dir, model, second)
        assert second.spoke.wait(60)
        held.set()
        with pytest.raises(InputError, match="is gone"):
            one.result()
        assert (two.result() / "config.json").is_file()
    assert [note.split()[0] for note in second.notes] == ["waiting", "packing"]


def test_ctrl_c_ends_the_wait(model, held):
    with ThreadPoolExecutor() as threads:
        one = threads.submit(import_cache.as_model_dir, model)
        assert held.begun.wait(60)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with sigint_handled_by():
            process = subprocess.Popen(
                [sys.executable, "-c", WAITING, model], stderr=subprocess.PIPE, text=True, env=environment
            )
        assert process.stderr.readline().startswith("waiting for another run")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        held.set()
        assert (one.result() / "config.json").is_file()
