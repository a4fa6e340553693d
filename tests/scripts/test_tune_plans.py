"""scripts/tune_plans.py with a stand-in for the GPU: what is measured, kept, reported and written."""

from __future__ import annotations

import json

import pytest
import refit_plans
import tune_plans
from trirun_kernels.plan.candidates import candidates, chosen, takes
from trirun_kernels.plan.problem import Device, Plan, Problem
from trirun_kernels.plan.table import stored

from tests.kernels.plan.support import needs_library

pytestmark = needs_library
H200 = Device(90, 132)


class StandIn:
    """Times by formula: ``seconds(problem, plan)``."""

    def __init__(self, seconds, stop_after: int = 1000) -> None:
        self.device, self.name, self.asked, self.wrong = H200, "stand-in", [], []
        self._seconds, self._left = seconds, stop_after

    def times(self, p, plans, seconds):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        self.asked.append((p, len(plans), seconds))
        return {plan: self._seconds(p, plan) for plan in plans}


def by_model(p: Problem, plan: Plan, **changed: float) -> float:
    """What the checked-in model says of a prefill plan, some of its costs changed; a plan outside of it is slow."""
    costs = stored("prefill")
    for name, factor in changed.items():
        for key, value in costs["cycles"][name].items():
            if key != "about":
                costs["cycles"][name][key] = value * factor
    return refit_plans.predicted_prefill(costs, p).get(plan, 1.0)


def run(tmp_path, timer, *arguments):
    shapes = ("--shapes", "4096x4096,8192x8192", "--act-bits", "16", "--group-sizes=-1")
    return tune_plans.main([*shapes, "--out", str(tmp_path), *arguments], timer)


def test_every_family_takes_what_it_has_plans_for():
    p = Problem(4096, 4096, 8, -1, 16, H200)
    for family in ("stream", "spans", "prefill"):
        plans = candidates(family, p)
        assert takes(family, p) and chosen(family, p) in plans and len(plans) > 5
    assert not takes("stream", p.with_rows(9)) and not takes("spans", p.with_rows(4))
    assert not takes("spans", Problem(4096, 4096, 8, 64, 16, H200))
    assert not takes("prefill", Problem(4096, 4096, 64, -1, 16, Device(80, 108)))


def test_dry_run_lists_problems_and_needs_no_gpu(tmp_path, capsys):
    assert run(tmp_path, None, "--dry-run", "--kernels", "stream", "--m", "1,4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 2 + 1 and lines[0].startswith("stream 4096x4096 m=1 group_size=-1 act_bits=16: ")
    assert lines[-1].startswith("8 problems, ") and lines[-1].endswith("minutes")
    assert not list(tmp_path.iterdir())


def test_a_stopped_run_goes_on_where_it_was(tmp_path, capsys):
    arguments = ("--kernels", "stream", "--m", "1", "--check")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, StandIn(lambda p, plan: 1e-5 + 1e-8 * plan.stages, stop_after=5), *arguments)
    file = tmp_path / "measurements.jsonl"
    assert len(file.read_text().splitlines()) == 2
    file.write_text(file.read_text() + '{"gpu": "stand-in", "ta')  # and one cut short
    again = StandIn(lambda p, plan: 1e-5 + 1e-8 * plan.stages)
    run(tmp_path, again, *arguments)
    assert len({p for p, *_ in again.asked}) == 2
    out = capsys.readouterr().out
    assert "stream: 4 problems, loss" in out and "(present)" in out and not list(tmp_path.glob("*.json"))
    nothing_left = StandIn(lambda p, plan: 1.0)
    run(tmp_path, nothing_left, *arguments)
    assert nothing_left.asked == []


def test_the_time_is_kept_to(tmp_path, capsys):
    run(tmp_path, StandIn(lambda p, plan: 1e-5), "--minutes", "0", "--check")
    assert "left: the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "measurements.jsonl").exists()


def test_losses_as_json(tmp_path, capsys):
    timer = StandIn(lambda p, plan: 1e-5 if plan.fused else 2e-5)
    run(tmp_path, timer, "--kernels", "stream", "--m", "2", "--check", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["left"] == 0 and document["loss"]["stream"]["problems"] == 4
    assert document["loss"]["stream"]["worst"] == pytest.approx(1.0)  # of two rows, quantized apart


def test_wrong_plans_are_left_out_and_named(tmp_path, capsys):
    class Faulty(StandIn):
        def times(self, p, plans, seconds):
            found = super().times(p, plans, seconds)
            self.wrong += [f"{plan}: wrong" for plan in found if plan.stages == 6]
            return {plan: t for plan, t in found.items() if plan.stages != 6}

    assert run(tmp_path, Faulty(lambda p, plan: 1e-5), "--kernels", "stream", "--m", "2", "--check") == 1
    out, err = capsys.readouterr()
    assert "stages=6" not in out and "stages=6" in err and "the present one is wrong" in out


def test_rules_get_the_plan_that_loses_least(tmp_path):
    favourite = (8, 4, 2, 4)  # of both problems' rules

    def seconds(p: Problem, plan: Plan) -> float:
        return 9e-6 if (plan.warps, plan.warp_split, plan.cta_split, plan.stages) == favourite else 1e-5

    run(tmp_path, StandIn(seconds), "--kernels", "stream", "--m", "4")
    before, after = stored("stream"), stored("stream", tmp_path)
    changed = [(a, b) for a, b in zip(before["act16"], after["act16"], strict=True) if a != b]
    assert len(changed) >= 2 and after["device"] == "stand-in" and after["act8"] == before["act8"]
    for old, new in changed:
        assert tuple(new["plans"][0][:4]) == favourite and new["plans"][1:] == old["plans"]
    run(tmp_path, StandIn(lambda p, plan: 1e-5), "--kernels", "stream", "--m", "4", "--out", str(tmp_path / "equal"))
    assert stored("stream", tmp_path / "equal")["act16"] == before["act16"]


def test_costs_are_fitted_to_times(tmp_path, capsys):
    arguments = ("--kernels", "prefill", "--m", "64,128,192,256,512,1024,2048")
    run(tmp_path, StandIn(lambda p, plan: by_model(p, plan, launch=1.5)), *arguments)
    before, after = stored("prefill")["cycles"], stored("prefill", tmp_path)["cycles"]
    for rows, cycles in before["launch"].items():
        if rows != "about":
            assert after["launch"][rows] == pytest.approx(1.5 * cycles, rel=0.1)
    for tile, cycles in before["k_column"]["channel"].items():
        if tile != "about":
            assert after["k_column"]["channel"][tile] == pytest.approx(cycles, rel=0.03)
    assert after["k_column"]["int8"] == before["k_column"]["int8"]  # nothing was measured of it
    assert "prefill: " in capsys.readouterr().out


def test_results_are_in_microseconds_by_plan(tmp_path):
    run(tmp_path, StandIn(lambda p, plan: 1.25e-5), "--kernels", "spans", "--m", "16", "--check")
    line = json.loads((tmp_path / "measurements.jsonl").read_text().splitlines()[0])
    assert line["gpu"] == "stand-in" and line["task"].startswith("spans 4096x4096 m=16")
    assert set(line["us"].values()) == {12.5}


def test_unknown_families_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, None, "--kernels", "streams", "--dry-run")
    assert "--kernels streams: none of stream, spans, prefill" in capsys.readouterr().err
