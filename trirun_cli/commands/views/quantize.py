"""What ``trirun quantize`` shows: the plan, progress while it works, the report."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from trirun_gptq.run.progress import BlockReport, ModuleReport, Observer

from ...console import Console, bytes_text

if TYPE_CHECKING:
    from trirun_gptq.run.memory import MemoryPlan
    from trirun_gptq.run.progress import Rehearsal, Report

    from ...workflows.quantize import Plan, Result

DIVERGED = 1.0  # nats per token above which a model's predictions have little to do with the original's
STAGES = {
    "embed": "embedding",
    "hessian": "calibrating",
    "solve": "solving",
    "refine": "refining",
    "replay": "replaying",
    "e2e": "training end to end",
}


class QuantizeView(Observer):
    """One progress bar over all blocks, its text saying what the current block is doing; ``finished`` of them are."""

    def __init__(self, console: Console) -> None:
        self._console, self._stack = console, ExitStack()
        self._warned: set[str] = set()
        self.finished = 0

    def __enter__(self) -> QuantizeView:
        self._bar = self._stack.enter_context(self._console.progress("preparing"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def plan(self, blocks: int, modules: int, tokens: int) -> None:
        self._bar.reset(blocks)
        self._console.note(f"{modules} matrices in {blocks} blocks, {tokens} calibration tokens")

    def memory(self, plan: MemoryPlan) -> None:
        where = "on the device" if plan.place.store == plan.device else "in host memory"
        dtype = str(plan.place.dtype).removeprefix("torch.")
        self._console.note(
            f"memory plan: {bytes_text(plan.total)} of {bytes_text(plan.free)} free on {plan.device} (a block and what "
            f"solves it {bytes_text(plan.working)}; activations {bytes_text(plan.streams)} as {dtype} {where})"
        )
        if not plan.fits:
            self._console.warn("the memory plan exceeds what is free; batches are halved if it runs out")

    def rehearsed(self, rehearsal: Rehearsal) -> None:
        peak = f", peak {bytes_text(rehearsal.device_bytes)} on the device" if rehearsal.device_bytes else ""
        self._console.note(f"rehearsal: the largest block on one batch took {rehearsal.seconds:.1f} s{peak}")

    def block_started(self, index: int, total: int, name: str) -> None:
        self._bar.describe(f"block {index + 1}/{total}")

    def stage(self, name: str, done: int, total: int) -> None:
        self._bar.describe(f"{STAGES.get(name, name)} {done}/{total}")

    def module_finished(self, report: ModuleReport) -> None:
        pass

    def block_finished(self, report: BlockReport) -> None:
        self._bar.advance()
        self.finished += 1
        taken = "taken from the stopped run" if report.resumed else f"{report.seconds:.1f} s"
        self._console.note(f"{report.name}: output error {report.error:.3%} of its energy, {taken}")

    def warning(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._console.warn(message)


def show_plan(console: Console, plan: Plan) -> None:
    """What is about to happen, in one note."""
    recipe = plan.recipe
    size = "output channel" if recipe.group_size == -1 else f"{recipe.group_size} inputs"
    grid = f"{'signed or midrise' if recipe.grid == 'auto' else recipe.grid} grid, one scale per {size}"
    console.note(
        f"{plan.model} → {plan.out}: {plan.weights / 1e6:.1f} M weights to {bytes_text(plan.packed_bytes)} ({grid}), "
        f"recipe {recipe.name!r}, {recipe.samples} × {recipe.seqlen} tokens of {plan.calibration}, on {plan.device}"
    )


def show_dry_run(console: Console, plan: Plan, report: Report) -> None:
    """The plan and the rehearsal as JSON; for people the notes have said it all."""
    memory, rehearsal = report.memory, report.rehearsal
    assert memory is not None and rehearsal is not None
    console.json(
        "quantize-plan/1",
        plan.to_dict()
        | {
            "memory": {
                "free_bytes": memory.free,
                "planned_bytes": memory.total,
                "working_bytes": memory.working,
                "activation_bytes": memory.streams,
                "activations_on": str(memory.place.store),
                "activation_dtype": str(memory.place.dtype).removeprefix("torch."),
                "fits": memory.fits,
            },
            "rehearsal": dataclasses.asdict(rehearsal),
        },
    )


def show_report(console: Console, plan: Plan, result: Result) -> None:
    """The losses of every module, the errors of every block, time by stage."""
    report = result.report
    console.json(
        "quantize/1",
        plan.to_dict()
        | {
            "out": str(plan.out),
            "bits_per_weight": report.bits_per_weight,
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "peak_memory_bytes": report.peak_bytes,
            "stages": {name: dataclasses.asdict(cost) for name, cost in report.stages.items()},
            "held_out": None if report.predictions is None else dataclasses.asdict(report.predictions),
            "sample": result.sample,
            "blocks": [
                {
                    "name": block.name,
                    "error": block.error,
                    "error_before_refine": block.error_before_refine,
                    "engine": block.engine,
                    "seconds": block.seconds,
                }
                for block in report.blocks
            ],
            "modules": [
                {
                    "name": module.name,
                    "n": module.n,
                    "k": module.k,
                    "group_size": module.spec.group_size,
                    "zero": module.spec.zero,
                    "loss": module.loss,
                    "damp": module.damp,
                    "tokens": module.tokens,
                    "seconds": module.seconds,
                }
                for module in report.modules
            ],
        },
    )
    worst = sorted(report.modules, key=lambda module: module.loss, reverse=True)
    shown = worst if len(worst) <= 16 else worst[:8]
    console.table(
        "relative output error of the matrices"
        + ("" if shown is worst else f", the worst {len(shown)} of {len(worst)}"),
        ("module", "n × k", "bits/weight", "error"),
        [(m.name, f"{m.n} × {m.k}", f"{m.bits_per_weight:.3f}", f"{m.loss:.2%}") for m in shown],
    )
    console.table(
        "time and peak memory by stage",
        ("stage", "time", "device", "host"),
        [
            (
                name,
                f"{cost.seconds:.1f} s",
                bytes_text(cost.device_bytes) if cost.device_bytes else "–",
                bytes_text(cost.host_bytes),
            )
            for name, cost in report.stages.items()
        ],
    )
    seconds = sum(cost.seconds for cost in report.stages.values())
    console.note(
        f"{report.bits_per_weight:.3f} bits per weight; {seconds:.1f} s; peak memory {bytes_text(report.peak_bytes)}"
    )
    held_out = report.predictions
    if held_out is not None:
        console.note(
            f"held-out calibration text ({held_out.tokens} tokens): perplexity {held_out.original_perplexity:.3f} → "
            f"{held_out.perplexity:.3f}, KL divergence {held_out.divergence:.4f} nats per token"
        )
        if held_out.divergence > DIVERGED:
            console.warn(
                f"the model diverged from its original (KL {held_out.divergence:.2f} per token); try --preset best, "
                "--group-size 64, or more calibration text like the model's own use"
            )
    if result.warning is not None:
        console.warn(result.warning)
    if result.sample is not None:
        console.note(f"a sample: {result.sample['prompt']!r} → {result.sample['text']!r}")
