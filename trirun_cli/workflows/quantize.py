"""``trirun quantize`` for programs: a model to 2 bits by GPTQ, published whole or not at all."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from trirun_gptq import calibration as calibration_data
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.recipe import Recipe
from trirun_gptq.run import distributed as ranks
from trirun_gptq.run.progress import Event, ProgressCallback, Warned, silent
from trirun_gptq.run.report import BlockReport, ModuleReport, Predictions, Report

from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, explain
from ..text.detokenizer import load_tokenizer
from .output import resuming, state_dir, weight_bytes
from .quantize_plan import QuantizePlan, plan_quantize

# Tokens of the sample that a finished run shows.
SAMPLE_PROMPT = 16
SAMPLE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Sample:
    """What a checkpoint writes, greedily: ``text`` after ``prompt``, the beginning of a calibration sequence."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """The outcome of :func:`quantize`.

    Attributes:
        plan: what was asked for, resolved: directories, recipe, device, number of weights.
        run: everything that was measured: memory, time by stage, and what the properties below show.
        written: whether this process wrote ``out``: not after a dry run, and of several processes only the first.
        bytes_before, bytes_after: of the weight files of model and checkpoint; 0 where nothing was written.
        sample: text of the result; None where it could not be run here, or nothing was written.
        seconds: of wall time.
    """

    plan: QuantizePlan
    run: Report
    written: bool = False
    bytes_before: int = 0
    bytes_after: int = 0
    sample: Sample | None = None
    seconds: float = 0.0

    @property
    def out(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.out

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of each quantized weight, scales included."""
        return self.run.bits_per_weight

    @property
    def modules(self) -> list[ModuleReport]:
        """The quantized matrices in model order, each with its grid and the relative error of its output."""
        return self.run.modules

    @property
    def blocks(self) -> list[BlockReport]:
        """The decoder blocks in order, each with the relative error of its output on held-out text."""
        return self.run.blocks

    @property
    def held_out(self) -> Predictions | None:
        """Perplexity before and after, and their divergence, on held-out calibration text; None without such text."""
        return self.run.predictions


def quantize(
    model: str | Path,
    out: str | Path,
    *,
    preset: str = "default",
    recipe: Recipe | str | Path | None = None,
    overrides: Iterable[str] = (),
    calibration: str | Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    end_to_end: bool = True,
    resume: bool = True,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
    **settings: Any,
) -> QuantizeReport:
    """Quantize the linear layers of a model's decoder blocks to 2 bits and write a checkpoint.

    ::

        report = quantize("llama", "llama-2bit", preset="fast", group_size=64, calibration="corpus.txt")
        print(report.bits_per_weight, report.held_out)

    On any exception nothing appears at ``out``. Of several processes that ``torchrun`` started each calls this with the
    same arguments; the first one reports progress and writes.

    Args:
        model: a Hugging Face model directory. out: the checkpoint directory to write.
        preset: ``fast`` (GPTQ), ``default`` (then trains each block) or ``best`` (trains it long, on more text).
        recipe: a recipe, or a YAML file that holds one, in the preset's place.
        overrides: ``REGEX=keep``, ``REGEX=g64`` or ``REGEX=GRID`` for the modules a pattern matches; the last match
            wins.
        calibration: text, see :func:`trirun_gptq.calibration.load`; None takes the excerpt that ships with trirun.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        overwrite: replace a non-empty ``out``, and the state that a stopped run of another kind has left beside it.
        end_to_end: train the whole model after its blocks where the recipe says so; False leaves that out.
        resume: keep finished blocks in ``OUT.state`` until the checkpoint is complete, and continue from there.
        dry_run: plan memory and time, quantize one block on one batch of the real text, and stop. Nothing is written.
        progress: called with a :class:`QuantizePlan`, then with the events of
            :func:`trirun_gptq.pipeline.quantize_model`.
        settings: keys of :class:`~trirun_gptq.recipe.Recipe`, such as ``group_size``, ``grid``, ``samples``,
            ``seqlen`` and ``seed``; they win over the recipe, None leaves a key to it.

    Raises:
        UsageError, InputError, QuantizationError: an argument, the model, the recipe, the text or the output does not
            fit.
    """
    started = time.perf_counter()
    if not ranks.launched_first():
        progress = silent
    plan = plan_quantize(
        Path(model),
        Path(out),
        preset=preset,
        recipe=recipe,
        settings=settings,
        overrides=overrides,
        calibration=None if calibration is None else str(calibration),
        device=device,
        overwrite=overwrite,
        end_to_end=end_to_end,
        progress=progress,
    )
    progress(plan)
    sequences = load_calibration(plan)
    plan = _within_text(plan, sequences, progress)
    if dry_run:
        report = quantize_model(
            plan.model, plan.recipe, sequences, _Nothing(), progress, device=plan.device, dry_run=True
        )
        return QuantizeReport(plan, report, seconds=time.perf_counter() - started)
    finished = 0

    def counting(event: Event) -> None:
        nonlocal finished
        finished += isinstance(event, BlockReport)
        progress(event)

    try:
        return _run(plan, sequences, counting, resume, started)
    except (KeyboardInterrupt, Exception) as error:
        stopped, state = isinstance(error, KeyboardInterrupt), state_dir(plan.out)
        # Of another run's state the error itself speaks.
        if resume and (stopped or finished) and state.exists():
            message = (
                f"{'interrupted: ' if stopped else ''}finished blocks are kept in {state}, the same command continues "
                "from there; with --no-resume it starts over"
            )
            if finished == plan.block_count and plan.recipe.end_to_end:
                message += "; with --no-end-to-end it writes the checkpoint of these blocks as they are"
            progress(Warned(message))
        raise


def _within_text(plan: QuantizePlan, sequences: list[Tensor], progress: ProgressCallback) -> QuantizePlan:
    """The plan with as many samples as there are sequences; a warning where these are fewer than its recipe's."""
    recipe = plan.recipe
    if len(sequences) == recipe.samples + recipe.held_out:
        return plan
    fewer = calibration_data.within(recipe, len(sequences))
    progress(
        Warned(
            f"{plan.calibration} holds {len(sequences)} sequences of {recipe.seqlen} tokens: calibrating on "
            f"{fewer.samples}, {fewer.held_out} held out (recipe {recipe.name!r} has {recipe.samples} and "
            f"{recipe.held_out}); more text gives a better model"
        )
    )
    return dataclasses.replace(plan, recipe=fewer)


def _run(
    plan: QuantizePlan, sequences: list[Tensor], progress: ProgressCallback, resume: bool, started: float
) -> QuantizeReport:
    """Quantize as planned and publish the checkpoint."""
    state = state_dir(plan.out)
    with ranks.joined(plan.device) as device, resuming():
        settings: dict[str, Any] = {
            "device": device,
            "state_dir": state if resume else None,
            "replace_state": plan.overwrite,
        }
        if ranks.rank() > 0:
            report = quantize_model(plan.model, plan.recipe, sequences, _Nothing(), **settings)
            return QuantizeReport(plan, report, seconds=time.perf_counter() - started)
        with CheckpointWriter(plan.out, ModelDir(plan.model), overwrite=plan.overwrite) as writer:
            report = quantize_model(plan.model, plan.recipe, sequences, writer, progress, **settings)
            writer.finish(report.modules, plan.linears, plan.to_recipe())
    if resume:
        shutil.rmtree(state, ignore_errors=True)
    try:
        sample = write_sample(plan, sequences[-1])
    except Exception as error:
        # The checkpoint is published and whole; what could not be shown does not undo it.
        known = explain(error)
        if known is None:
            raise
        sample = None
        progress(Warned(f"no sample was generated: {known}"))
    before, after = weight_bytes(plan.model), weight_bytes(plan.out)
    return QuantizeReport(plan, report, True, before, after, sample, time.perf_counter() - started)


class _Nothing:
    """A writer that keeps nothing."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Forget the tensor."""


def load_calibration(plan: QuantizePlan) -> list[Tensor]:
    """The token sequences of a run, int64 [length] each; fewer than its recipe's where the text is short and their
    number was not asked for.

    Raises:
        InputError: the model's tokenizer is missing. QuantizationError: the text is missing, malformed or too short.
    """
    return calibration_data.load(plan.calibration, load_tokenizer(plan.model), plan.recipe, fewer=plan.fewer)


def write_sample(plan: QuantizePlan, sequence: Tensor) -> Sample:
    """What the finished checkpoint writes, greedily, after the beginning of a calibration sequence int64 [length].

    Raises:
        TrirunError, NativeError, torch.OutOfMemoryError: the checkpoint cannot be run on this machine.
    """
    from ..backends.registry import open_runner
    from ..engine.engine import Engine
    from ..engine.generation import stop_ids
    from ..engine.request import Request
    from ..engine.sampling import SamplingParams

    tokenizer = load_tokenizer(plan.model)
    engine = Engine(open_runner(plan.out, device=plan.device, slots=1))
    prompt = sequence[:SAMPLE_PROMPT].tolist()
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0.0)
    request = Request("sample", tuple(prompt), params, frozenset(stop_ids(ModelDir(plan.out))))
    events = list(engine.generate([request]))
    if events[-1].error is not None:
        raise InputError(events[-1].error)
    tokens = [token.id for event in events for token in event.tokens]
    return Sample(tokenizer.decode(prompt), tokenizer.decode(tokens))
