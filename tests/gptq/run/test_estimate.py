"""How long a run will take, from what one block has taken."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trirun_gptq.run.estimate import BLOCK_EVALUATIONS, MODEL_EVALUATIONS, plan_time
from trirun_gptq.run.preflight import Trial, step_time
from trirun_gptq.run.profile import StageCost
from trirun_gptq.run.report import Preflight
from trirun_gptq.run.timing import TimePlan, duration
from trirun_gptq.whole.rehearsal import StepTime

from tests.gptq.models import RECIPE, make_model, run

SECONDS = {"load": 1.0, "forward": 4.0, "hessian": 2.0, "solve": 5.0, "refine": 9.0}
SPENT = {"scan": 0.5, "embed": 0.5}


def trial(**stages):
    costs = {name: StageCost(seconds, 0, 0) for name, seconds in (SECONDS | stages).items()}
    return Trial(Preflight(1.0, 0), 1, {}, costs, refine_step=0.1, refine_start=0.7, evaluation=0.2, pack=0.25)


def batches(count):
    return [SimpleNamespace(tokens=torch.zeros(2, 50, dtype=torch.int64)) for _ in range(count)]


def planned(recipe, train, held_out, training=(), sizes=(50, 100), finished=(False, False)):
    parts = batches(train), batches(held_out)
    return plan_time(trial(), sizes, finished, parts, recipe, list(training), 0.01, SPENT)


def test_a_step_that_others_hold_up_does_not_count():
    assert step_time([1.0, 1.5, 2.0, 9.0, 9.5]) == 0.5


def test_passes_grow_with_the_text_and_solving_does_not():
    plan = planned(RECIPE, 3, 1)
    # One block, and one half as large: 1.5 of the one that was tried. Twice over all tokens, and once over those held
    # out: nine batches, where the trial had five.
    assert plan.stages["forward"] == pytest.approx(1.5 * 4.0 * 9 / 5)
    assert plan.stages["hessian"] == pytest.approx(1.5 * 2.0 * 4 / 2)
    assert plan.stages["solve"] == 1.5 * 5.0 and plan.stages["compare"] == 0.01 * 100
    assert plan.seconds == pytest.approx(sum(SPENT.values()) + sum(plan.blocks) + plan.end)
    assert plan.blocks[1] == 2 * plan.blocks[0] and "refine" not in plan.stages


def test_training_grows_with_its_steps():
    recipe = replace(RECIPE, refine_steps=40, e2e_steps=10, engines=("ste", "gumbel"))
    plan = planned(recipe, 3, 2, [(10, StepTime(block=0.3, rest=0.6, start=1.8))])
    # A step trains on all three batches, of which one was tried.
    assert plan.stages["refine"] == pytest.approx(1.5 * (0.7 + 40 * 3 * 0.1 + BLOCK_EVALUATIONS * 2 * 0.2 * 2))
    step = 1.5 * 0.3 + 0.6
    # Both heads on 200 tokens, and 1.5 blocks on two batches.
    evaluations = MODEL_EVALUATIONS * (0.01 * 200 + 1.5 * 0.2 * 2)
    assert plan.stages["end to end"] == pytest.approx(10 * 3 * step + 1.8 * step / 0.9 + evaluations)
    assert plan.end_steps == 10 and "compare" not in plan.stages


def test_blocks_that_a_stopped_run_has_left_are_only_run_through():
    plan = planned(RECIPE, 3, 1, finished=(True, False))
    assert plan.stages["solve"] == 5.0 and plan.stages["load"] == 1.5
    assert plan.blocks[0] == pytest.approx(0.5 * (1.0 + 4.0 * 9 / 5))


@pytest.mark.parametrize(
    ("changes", "dry_run", "expected"), [({}, False, 0), ({}, True, 1), ({"refine_steps": 2, "e2e_steps": 2}, False, 1)]
)
def test_a_run_that_is_long_is_told_how_long(tmp_path, changes, dry_run, expected):
    make_model(tmp_path)
    _, report, _ = run(tmp_path, replace(RECIPE, **changes), dry_run=dry_run)
    assert (report.time is not None) == bool(expected)
    if expected:
        wanted = {"scan", "embed", "preflight", "load", "forward", "hessian", "solve", "write"}
        wanted |= {"refine", "end to end"} if changes else {"compare"}
        assert report.time.stages.keys() == wanted and all(seconds > 0 for seconds in report.time.stages.values())
        assert dry_run or set(report.stages) == wanted
        assert isinstance(report.time, TimePlan) and len(report.time.blocks) == 2


def test_durations_are_words():
    assert [duration(s) for s in (0.4, 75, 600, 5000, 50000)] == ["0 s", "75 s", "10 min", "83 min", "13.9 h"]
