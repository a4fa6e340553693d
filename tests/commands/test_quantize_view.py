"""The bar of ``trirun quantize`` covers the whole run, end-to-end training too."""

from types import SimpleNamespace

import pytest
from trirun_gptq.run.progress import Planned, Stage
from trirun_gptq.run.report import BlockReport
from trirun_gptq.run.timing import TimePlan

from trirun_cli.commands.views.quantize import QuantizeView
from trirun_cli.console import Console


class Bar:
    def __init__(self):
        self.total, self.done = None, 0.0

    def reset(self, total):
        self.total, self.done = total, 0.0

    def advance(self, amount=1):
        self.done += amount

    def describe(self, text):
        self.text = text


@pytest.fixture
def view():
    view = QuantizeView(Console(quiet=True))
    view.bar = Bar()
    view(Planned(2, 14, 1000))
    return view


def block(index):
    return BlockReport(index, f"layers.{index}", 0.1, 0.1, False, 1.0)


def test_blocks_count_alike_where_their_time_is_not_known(view):
    view(block(0))
    assert (view.bar.total, view.bar.done) == (100, 50)
    view(block(1))
    assert view.bar.done == 100


def test_the_end_counts_by_its_time(view):
    view(TimePlan({"solve": 40.0, "end to end": 60.0}, (10.0, 30.0), 60.0, 4))
    view(block(0))
    assert view.bar.done == pytest.approx(10)
    view(block(1))
    assert view.bar.done == pytest.approx(40)
    for phase in range(2):
        for step in (1, 2):
            view(Stage("e2e", step, 2))
            assert view.bar.done == pytest.approx(40 + 15 * (2 * phase + step))
    assert view.bar.done == pytest.approx(100)


@pytest.mark.parametrize(
    ("device", "name", "advice"),
    [
        ("cpu", "best", "a GPU, --preset default or fast and fewer --samples are faster"),
        ("cpu", "default", "a GPU, --preset fast and fewer --samples are faster"),
        ("cpu", "fast", "a GPU and fewer --samples are faster"),
        ("cuda", "best", None),
    ],
)
def test_long_runs_on_a_cpu_are_warned_of(view, capsys, device, name, advice):
    recipe = SimpleNamespace(group_size=64, grid="auto", name=name, samples=1, seqlen=1)
    plan = {"device": device, "recipe": recipe, "model": "M", "out": "Q", "weights": 1, "packed_bytes": 1}
    view._plan(SimpleNamespace(**plan, calibration="t", asked={}))
    view(TimePlan({"solve": 4e4}, (3e4, 1e4), 0.0, 0))
    told = " ".join(capsys.readouterr().err.split())
    assert ("this takes about 11.1 h on the CPU" in told) == (advice is not None)
    assert advice is None or advice in told
