"""What ``trirun finetune`` shows: the plan, progress while it trains, the report."""

from __future__ import annotations

import math
import time

from trirun_gptq.run.progress import Event, Stage, Warned
from trirun_gptq.train.progress import Evaluated, Resumed, Saved, StepsDone

from ...console import Console
from ...workflows.finetune import FinetuneReport
from ...workflows.finetune_plan import FinetunePlan
from .progress import ProgressView

STAGES = {
    "scan": ("checking the weights", "tensors"),
    "start": ("quantizing the start", "blocks"),
    "generate": ("sampling the original model", "sequences"),
}


class FinetuneView(ProgressView):
    """One progress bar over all steps, its text saying the loss and the speed."""

    def __init__(self, console: Console, started: float) -> None:
        super().__init__(console)
        self._total, self._done = 0, 0
        self._started = started

    def __call__(self, event: Event) -> None:
        console = self.console
        match event:
            case FinetunePlan():
                self._plan(event)
            case Stage(name, done, total):
                title, unit = STAGES[name]
                self._move(done, total)
                self.bar.describe(f"{title}, {unit}")
                if done == total:
                    seconds = time.perf_counter() - self._started
                    console.note(f"{title}: {total} {unit}, {seconds:.0f} s after the start")
            case Resumed(step):
                console.note(f"continuing a stopped run after step {step}")
            case StepsDone():
                self._move(round(1000 * event.done), 1000)
                self.bar.describe(f"training: KL {event.kl:.3f}, {event.tokens_per_second:,.0f} tokens/s")
            case Evaluated(evaluation, best):
                mark = "" if best else ", not the best so far"
                text = f"held-out perplexity {math.exp(min(evaluation.nll, 700)):.3f}, KL {evaluation.kl:.4f}{mark}"
                console.note(f"step {evaluation.step}: {text}")
            case Saved(step, stop=True):
                console.note(f"step {step}: the state of the run is saved; the same command continues it")
            case Warned(message):
                console.warn(message)

    def _plan(self, plan: FinetunePlan) -> None:
        recipe = plan.recipe
        length = f"{recipe.minutes:g} minutes" if recipe.minutes else f"{recipe.steps} steps"
        step = f"{recipe.batch} × {recipe.seqlen} tokens per step"
        text = ", ".join(plan.data) + (f" and {recipe.generated} generated sequences" if recipe.generated else "")
        self.console.note(
            f"{plan.model} → {plan.out}: {plan.weights / 1e6:.1f} M weights at {plan.bits_per_weight:.3f} bits, "
            f"recipe {recipe.name!r}, {length} with {step} of {text}; on {plan.device} in {recipe.precision}"
            f"{', compiled' if plan.compiled else ''}"
        )

    def _move(self, done: int, total: int) -> None:
        if total != self._total or done < self._done:
            self.bar.reset(total)
            self._total, self._done = total, 0
        self.bar.advance(done - self._done)
        self._done = done


def show_dry_run(console: Console, report: FinetuneReport) -> None:
    """The plan as JSON; for people the note has said it all."""
    console.json("finetune-plan/1", report.plan.to_dict())


def show_report(console: Console, report: FinetuneReport) -> None:
    """Held-out losses over the run, and the packed checkpoint beside the trained weights."""
    plan, tokens, best = report.plan, report.tokens, report.best
    assert best is not None
    console.json(
        "finetune/1",
        plan.to_dict()
        | {
            "out": str(plan.out),
            "steps": report.steps,
            "tokens": tokens,
            "seconds": report.seconds_training,
            "seconds_before": report.seconds_before,
            "seconds_after": report.seconds_after,
            "best_step": best.step,
            "held_out": {
                "windows": plan.recipe.held_out,
                "original_perplexity": report.original_perplexity,
                "perplexity": report.perplexity,
                "kl": best.kl,
            },
            "check": {"trained_perplexity": report.trained_perplexity, "packed_perplexity": report.packed_perplexity},
            "evaluations": [
                {"step": e.step, "kl": e.kl, "perplexity": math.exp(min(e.nll, 700))} for e in report.evaluations
            ],
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
        },
    )
    if console.quiet:
        return
    first = report.evaluations[0]
    rows = [("original", "", f"{report.original_perplexity:.3f}", "0")]
    rows += [
        (label, str(e.step), f"{math.exp(min(e.nll, 700)):.3f}", f"{e.kl:.4f}")
        for label, e in (("at the start", first), ("kept", best))
    ]
    console.table(
        f"held-out text, {plan.recipe.held_out} × {plan.recipe.seqlen} tokens",
        ("", "step", "perplexity", "KL from the original"),
        rows,
    )
    console.note(
        f"packed and trained agree: perplexity {report.packed_perplexity:.4f} and {report.trained_perplexity:.4f}"
    )
    amount = f"{tokens / 1e6:.1f} M" if tokens >= 1e6 else f"{tokens:,}"
    speed = f"{amount} tokens in {report.seconds_training:.0f} s of training"
    ends = f"{report.seconds_before:.0f} s before it and {report.seconds_after:.0f} s after"
    console.note(f"{plan.bits_per_weight:.3f} bits per weight; {speed}, {ends}")
