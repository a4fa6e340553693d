"""trirun bench model where memory is short: what does not fit is missing, and everything else is measured."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from trirun_cli.bench import cpu_contestant
from trirun_cli.bench.cpu_contestant import CpuContestant, DenseContestant
from trirun_cli.bench.models import run

QUICK = ("--batch", "1,2", "--context", "24", "--seconds", "0.001", "--device", "cpu", "-q")
GIB = 2**30


@pytest.fixture(autouse=True)
def own_garbage():
    """A run collects garbage often: not in what the tests before have left, some 10 s for a test in a whole run."""
    gc.freeze()
    yield
    gc.unfreeze()


class Machine:
    """Memory, of which contestants hold what they need while they are open."""

    def __init__(self, size):
        self.size, self.held, self.most, self.log = size, 0, 0, []


class Hungry:
    """Takes so many bytes a sequence of its cache, and ``beside`` of them where it is opened, or in its runs."""

    settle_s, weight_bytes = 0.0, 100

    def __init__(self, name, machine, each, *, beside=0, where="open"):
        self.name, self._machine, self._each, self._beside, self._where = name, machine, each, beside, where

    def room(self, batch, context):
        return batch * self._each, self._machine.size - self._machine.held

    def open(self, batch, context):
        machine, held = self._machine, Held(self._machine, batch * self._each)
        self._look("open")
        machine.log.append((self.name, batch))

        def runner(where):
            def run(alive=held):
                self._look(where)
                return 0.5

            return run

        return runner("prefill"), runner("step")

    def _look(self, where):
        if where == self._where and self._machine.held + self._beside > self._machine.size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Held:
    def __init__(self, machine, size):
        if machine.held + size > machine.size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._machine, self._size = machine, size
        machine.held += size
        machine.most = max(machine.most, machine.held)

    def __del__(self):
        self._machine.held -= self._size


def names(cell):
    return [name for name, speed in cell.speeds.items() if speed is not None]


def test_every_cell_takes_what_it_needs_and_gives_it_back():
    machine = Machine(100)
    cells = list(run([Hungry("int2", machine, 10), Hungry("float16", machine, 10)], [1, 4, 5], [64], seconds=0))
    assert machine.held == 0 and machine.most == 100
    assert all(names(cell) == ["int2", "float16"] and not cell.missing for cell in cells)


def test_what_fits_alone_is_measured_after_the_others():
    machine = Machine(100)
    hungry = [Hungry("int2", machine, 60), Hungry("float16", machine, 60), Hungry("int8 cache", machine, 30)]
    cell = next(run(hungry, [1], [64], seconds=0))
    assert names(cell) == ["int2", "float16", "int8 cache"] and not cell.missing and machine.held == 0
    assert machine.log == [("int2", 1), ("int8 cache", 1), ("float16", 1)]


@pytest.mark.parametrize("where", ["open", "prefill", "step"])
def test_what_does_not_fit_is_missing_and_the_run_goes_on(where):
    machine = Machine(100 * GIB)
    int2 = Hungry("int2", machine, 10 * GIB)
    hungry = [int2, Hungry("float16", machine, 10 * GIB, beside=85 * GIB, where=where)]
    cells = list(run(hungry, [1, 2, 11], [64], seconds=0))
    assert [names(cell) for cell in cells] == [["int2", "float16"], ["int2"], []] and machine.held == 0
    assert cells[1].missing == {
        "float16": "does not fit: needs more than 20.0 GiB of cache, of 100.0 GiB that are free"
    }
    assert cells[2].notes == [
        f"batch 11, context 64: {name} does not fit: needs 110.0 GiB of cache, of 100.0 GiB that are free"
        for name in ("int2", "float16")
    ]
    facts = cells[1].document()
    assert facts["float16"] is facts["decode_speedup"] is facts["int2"]["decode_speedup"] is None
    assert facts["int2"]["decode_tokens_per_s"] == 4 and facts["missing"] == cells[1].missing
    assert cells[2].document()["decode_speedup"] is None and "missing" not in cells[0].document()


def test_other_errors_end_the_run():
    class Wrong(Hungry):
        def open(self, batch, context):
            raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        next(run([Wrong("int2", Machine(9), 1)], [1], [64], seconds=0))


def fails_for_two(open_, error):
    def opened(self, batch, context):
        if batch == 2:
            raise error
        return open_(self, batch, context)

    return opened


@pytest.mark.parametrize(
    "error", [MemoryError("no"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_the_command_shows_what_it_measured(trirun, monkeypatch, error):
    monkeypatch.setattr(DenseContestant, "open", fails_for_two(DenseContestant.open, error))
    code, out, err = trirun("bench", "model", "--shape", "tiny", *QUICK, "--json")
    first, second = json.loads(out)["results"]
    assert code == 0 and first["decode_speedup"] > 0 and "missing" not in first
    assert second["bfloat16"] is None and second["decode_speedup"] is None
    assert second["int2"]["decode_tokens_per_s"] > 0 and "does not fit: needs" in second["missing"]["bfloat16"]
    assert "batch 2, context 24: bfloat16 does not fit: needs" in " ".join(err.split())


def test_a_table_with_a_gap(trirun, monkeypatch):
    monkeypatch.setattr(DenseContestant, "open", fails_for_two(DenseContestant.open, MemoryError("no")))
    code, out, err = trirun("bench", "model", "--shape", "tiny", *QUICK)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert code == 0 and [row[:3] for row in rows] == [
        ["24", batch, name] for batch in "12" for name in ("int2", "bfloat16")
    ]
    assert "—" not in rows[0] + rows[1] and rows[3][3:] == ["—"] * 7 and rows[2][-2:] == ["—"] * 2
    assert err.count("does not fit: needs") == 1


def test_a_plot_with_gaps(trirun, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(DenseContestant, "open", fails_for_two(DenseContestant.open, MemoryError("no")))
    monkeypatch.setattr(CpuContestant, "open", fails_for_two(CpuContestant.open, MemoryError("no")))
    path = tmp_path / "speed.png"
    code, _, err = trirun("bench", "model", "--shape", "tiny", *QUICK, "--plot", str(path))
    assert code == 0, err
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_any_room(trirun, monkeypatch):
    monkeypatch.setattr(cpu_contestant, "available_bytes", lambda: 1000)
    code, out, err = trirun("bench", "model", "--shape", "tiny", *QUICK, "--json")
    assert code == 5 and not out
    assert "int2 does not fit: needs" in " ".join(err.split()) and "of 1000 B that are free" in " ".join(err.split())
