"""What ``trirun quantize`` shows: the plan, progress while it works, the report."""

from __future__ import annotations

import dataclasses

from trirun_gptq.run.memory import MemoryPlan
from trirun_gptq.run.progress import BlockStarted, Event, Planned, Stage, Warned
from trirun_gptq.run.report import BlockReport, Preflight
from trirun_gptq.run.timing import TimePlan, duration

from ...console import Console, bytes_text
from ...workflows.output import in_words
from ...workflows.quantize import QuantizeReport
from ...workflows.quantize_plan import QuantizePlan
from .progress import ProgressView

PERCENT = 100
LONG = 1200  # seconds on a CPU that the user is warned of
FASTER = {"best": ", --preset default or fast", "default": ", --preset fast"}  # than a preset
DIVERGED = 1.0  # nats per token above which a model's predictions have little to do with the original's
STAGES = {
    "scan": "checking tensors",
    "embed": "embedding",
    "hessian": "calibrating",
    "solve": "solving",
    "refine": "refining",
    "replay": "replaying",
    "e2e": "training end to end",
}


class QuantizeView(ProgressView):
    """One progress bar over the whole run, in percent of the time that it is expected to take; its text says what is
    being done. Where that time is not known, blocks count alike."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._warned: set[str] = set()
        self._on_cpu, self._faster = False, ""
        # Seconds, or where these are not known 1 for a block: of every block, of the end, and what is done of them.
        self._blocks: tuple[float, ...] = ()
        self._end = self._done = 0.0
        self._steps = 0

    def __call__(self, event: Event) -> None:
        console = self.console
        match event:
            case QuantizePlan():
                self._plan(event)
            case MemoryPlan():
                self._memory(event)
            case Planned(blocks, modules, tokens):
                self._blocks = (1.0,) * blocks
                self.bar.reset(PERCENT)
                console.note(f"{modules} matrices in {blocks} blocks, {tokens} calibration tokens")
            case Preflight(seconds, device_bytes):
                peak = f", peak {bytes_text(device_bytes)} on the device" if device_bytes else ""
                console.note(f"preflight: the largest block on one batch took {seconds:.1f} s{peak}")
            case TimePlan():
                self._blocks, self._end, self._steps = event.blocks, event.end, event.end_steps
                self._time(event)
            case BlockStarted(index, total):
                self.bar.describe(f"block {index + 1}/{total}")
            case Stage(name, done, total):
                self.bar.describe(f"{STAGES.get(name, name)} {done}/{total}")
                if name == "e2e":
                    self._advance(self._end / max(self._steps, total))
            case BlockReport():
                self._advance(self._blocks[event.index])
                taken = "taken from the stopped run" if event.resumed else f"{event.seconds:.1f} s"
                console.note(f"{event.name}: output error {event.error:.3%} of its energy, {taken}")
            case Warned(message) if message not in self._warned:
                self._warned.add(message)
                console.warn(message)

    def _advance(self, amount: float) -> None:
        """So much more of the run is done; the phases of end-to-end training share its end."""
        everything = sum(self._blocks) + self._end
        amount = min(amount, everything - self._done)
        self._done += amount
        self.bar.advance(PERCENT * amount / everything)

    def _time(self, plan: TimePlan) -> None:
        training = plan.stages.get("end to end", 0.0)
        parts = f" ({duration(sum(plan.blocks))} for the blocks, {duration(training)} end to end)" if training else ""
        self.console.note(f"time: about {duration(plan.seconds)}{parts}")
        if self._on_cpu and plan.seconds > LONG:
            self.console.warn(
                f"this takes about {duration(plan.seconds)} on the CPU; a GPU{self._faster} and fewer --samples are "
                "faster; a stopped run continues"
            )

    def _plan(self, plan: QuantizePlan) -> None:
        recipe = plan.recipe
        self._on_cpu = plan.device == "cpu"
        self._faster = FASTER.get(recipe.name, "")
        size = "output channel" if recipe.group_size == -1 else f"{recipe.group_size} inputs"
        grid = f"{'signed or midrise' if recipe.grid == 'auto' else recipe.grid} grid, one scale per {size}"
        self.console.note(
            f"{plan.model} → {plan.out}: {plan.weights / 1e6:.1f} M weights to {bytes_text(plan.packed_bytes)} "
            f"({grid}), recipe {recipe.name!r}, {recipe.samples} × {recipe.seqlen} tokens of {plan.calibration}, "
            f"on {plan.device}"
        )
        if plan.asked:
            self.console.note(f"kept in 16 bits, as the recipe or --override says: {in_words(plan.asked)}")

    def _memory(self, plan: MemoryPlan) -> None:
        where = "on the device" if plan.place.store == plan.device else "in host memory"
        dtype = str(plan.place.dtype).removeprefix("torch.")
        self.console.note(
            f"memory plan: {bytes_text(plan.total)} of {bytes_text(plan.free)} free on {plan.device} (a block and what "
            f"solves it {bytes_text(plan.working)}; activations {bytes_text(plan.streams)} as {dtype} {where})"
            + (f"; with what the program holds {bytes_text(plan.peak)}" if plan.held else "")
        )
        if not plan.fits:
            self.console.warn("the memory plan exceeds what is free; batches are halved if it runs out")


def show_dry_run(console: Console, report: QuantizeReport) -> None:
    """The plan and the preflight as JSON; for people the notes have said it all."""
    memory, preflight, time = report.run.memory, report.run.preflight, report.run.time
    assert memory is not None and preflight is not None and time is not None
    console.json(
        "quantize-plan/1",
        report.plan.to_dict()
        | {
            "memory": {
                "free_bytes": memory.free,
                "planned_bytes": memory.total,
                "process_bytes": memory.peak,
                "working_bytes": memory.working,
                "activation_bytes": memory.streams,
                "activations_on": str(memory.place.store),
                "activation_dtype": str(memory.place.dtype).removeprefix("torch."),
                "fits": memory.fits,
            },
            # Its first name, kept within this version of the document.
            "rehearsal": dataclasses.asdict(preflight),
            "time": {"seconds": time.seconds, "stages": time.stages},
        },
    )


def show_report(console: Console, report: QuantizeReport) -> None:
    """The losses of every module, the errors of every block, time by stage."""
    run = report.run
    planned = {} if run.time is None else run.time.stages
    console.json(
        "quantize/1",
        report.plan.to_dict()
        | {
            "out": str(report.out),
            "bits_per_weight": report.bits_per_weight,
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
            "peak_memory_bytes": run.peak_bytes,
            "stages": {
                name: dataclasses.asdict(cost) | {"planned_seconds": planned.get(name)}
                for name, cost in run.stages.items()
            },
            "planned_seconds": None if run.time is None else run.time.seconds,
            "held_out": None if run.predictions is None else dataclasses.asdict(run.predictions),
            "sample": None if report.sample is None else dataclasses.asdict(report.sample),
            "blocks": [
                {
                    "name": block.name,
                    "error": block.error,
                    "error_before_refine": block.error_before_refine,
                    # Its first name, kept within this version of the document.
                    "engine": block.method,
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
    if console.quiet:
        _diverged(console, report)
        return
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
        ("stage", "planned", "time", "device", "host"),
        [
            (
                name,
                f"{planned[name]:.1f} s" if name in planned else "–",
                f"{cost.seconds:.1f} s",
                bytes_text(cost.device_bytes) if cost.device_bytes else "–",
                bytes_text(cost.host_bytes),
            )
            for name, cost in run.stages.items()
        ],
    )
    seconds = sum(cost.seconds for cost in run.stages.values())
    expected = "" if run.time is None else f" ({run.time.seconds:.1f} s planned)"
    console.note(
        f"{report.bits_per_weight:.3f} bits per weight; {seconds:.1f} s{expected}; "
        f"peak memory {bytes_text(run.peak_bytes)}"
    )
    held_out = report.held_out
    if held_out is not None:
        console.note(
            f"held-out calibration text ({held_out.tokens} tokens): perplexity {held_out.original_perplexity:.3f} → "
            f"{held_out.perplexity:.3f}, KL divergence {held_out.divergence:.4f} nats per token"
        )
    _diverged(console, report)
    if report.sample is not None:
        console.note(f"a sample: {report.sample.prompt!r} → {report.sample.text!r}")


def _diverged(console: Console, report: QuantizeReport) -> None:
    """A warning where the result has little to do with the original."""
    held_out = report.held_out
    if held_out is not None and held_out.divergence > DIVERGED:
        console.warn(
            f"the model diverged from its original (KL {held_out.divergence:.2f} per token); try --preset best, "
            "--group-size 64, or more calibration text like the model's own use"
        )
