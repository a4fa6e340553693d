"""What ``trirun finetune`` shows: the plan, progress while it trains, the report."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from trirun_gptq.train.progress import TrainObserver
from trirun_gptq.train.state import Evaluation

from ...console import Console

if TYPE_CHECKING:
    from ...workflows.finetune import Plan, Result

STAGES = {"start": ("quantizing the start", "blocks"), "generate": ("sampling the original model", "sequences")}


class FinetuneView(TrainObserver):
    """One progress bar over all steps, its text saying the loss and the speed."""

    def __init__(self, console: Console, started: float) -> None:
        self._console, self._stack = console, ExitStack()
        self._total, self._done = 0, 0
        self._started = started

    def __enter__(self) -> FinetuneView:
        self._bar = self._stack.enter_context(self._console.progress("preparing"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stage(self, name: str, done: int, total: int) -> None:
        title, unit = STAGES[name]
        self._move(done, total)
        self._bar.describe(f"{title}, {unit}")
        if done == total:
            self._console.note(f"{title}: {total} {unit}, {time.perf_counter() - self._started:.0f} s after the start")

    def resumed(self, step: int) -> None:
        self._console.note(f"continuing a stopped run after step {step}")

    def step(self, step: int, done: float, kl: float, ce: float, tokens_per_second: float) -> None:
        self._move(round(1000 * done), 1000)
        self._bar.describe(f"training: KL {kl:.3f}, {tokens_per_second:,.0f} tokens/s")

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        mark = "" if best else ", not the best so far"
        text = f"held-out perplexity {math.exp(min(evaluation.nll, 700)):.3f}, KL {evaluation.kl:.4f}{mark}"
        self._console.note(f"step {evaluation.step}: {text}")

    def saved(self, step: int, stop: bool) -> None:
        if stop:
            self._console.note(f"step {step}: the state of the run is saved; the same command continues it")

    def _move(self, done: int, total: int) -> None:
        if total != self._total or done < self._done:
            self._bar.reset(total)
            self._total, self._done = total, 0
        self._bar.advance(done - self._done)
        self._done = done


def show_plan(console: Console, plan: Plan) -> None:
    """What is about to happen, in one note."""
    recipe = plan.recipe
    length = f"{recipe.minutes:g} minutes" if recipe.minutes else f"{recipe.steps} steps"
    step = f"{recipe.batch} × {recipe.seqlen} tokens per step"
    text = ", ".join(plan.data) + (f" and {recipe.generated} generated sequences" if recipe.generated else "")
    console.note(
        f"{plan.model} → {plan.out}: {plan.weights / 1e6:.1f} M weights at {plan.bits_per_weight:.3f} bits, "
        f"recipe {recipe.name!r}, {length} with {step} of {text}; on {plan.device} in {recipe.precision}"
        f"{', compiled' if plan.compiled else ''}"
    )


def show_report(console: Console, plan: Plan, result: Result) -> None:
    """Held-out losses over the run, and the packed checkpoint beside the trained weights."""
    progress = result.trained.progress
    tokens = progress.step * plan.recipe.batch * plan.recipe.seqlen
    best = next(evaluation for evaluation in progress.evaluations if evaluation.step == progress.best)
    console.json(
        "finetune/1",
        plan.to_dict()
        | {
            "out": str(plan.out),
            "steps": progress.step,
            "tokens": tokens,
            "seconds": progress.seconds,
            "seconds_before": progress.others,
            "seconds_after": result.finishing,
            "best_step": progress.best,
            "held_out": {
                "windows": plan.recipe.held_out,
                "original_perplexity": math.exp(result.trained.original_nll),
                "perplexity": math.exp(best.nll),
                "kl": best.kl,
            },
            "check": {"trained_perplexity": result.trained_ppl, "packed_perplexity": result.packed_ppl},
            "evaluations": [
                {"step": e.step, "kl": e.kl, "perplexity": math.exp(min(e.nll, 700))} for e in progress.evaluations
            ],
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
        },
    )
    first = progress.evaluations[0]
    rows = [("original", "", f"{math.exp(result.trained.original_nll):.3f}", "0")]
    rows += [
        (label, str(e.step), f"{math.exp(min(e.nll, 700)):.3f}", f"{e.kl:.4f}")
        for label, e in (("at the start", first), ("kept", best))
    ]
    console.table(
        f"held-out text, {plan.recipe.held_out} × {plan.recipe.seqlen} tokens",
        ("", "step", "perplexity", "KL from the original"),
        rows,
    )
    console.note(f"packed and trained agree: perplexity {result.packed_ppl:.4f} and {result.trained_ppl:.4f}")
    amount = f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    speed = f"{amount} tokens in {progress.seconds:.0f} s of training"
    ends = f"{progress.others:.0f} s before it and {result.finishing:.0f} s after"
    console.note(f"{plan.bits_per_weight:.3f} bits per weight; {speed}, {ends}")
