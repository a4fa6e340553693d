"""``trirun finetune`` for programs: a model trained on its 2-bit or ternary grid, published and checked."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.model.loader import TensorSource
from trirun_gptq.run import distributed as ranks
from trirun_gptq.run.progress import ProgressCallback, silent
from trirun_gptq.run.resume import fingerprint
from trirun_gptq.train import start as starts
from trirun_gptq.train.data import load_text
from trirun_gptq.train.model import Trained, train_model
from trirun_gptq.train.recipe import TrainRecipe
from trirun_gptq.train.state import Evaluation, TrainState
from trirun_gptq.train.student import Student
from trirun_gptq.train.workers import Workers

from ..checkpoint.model_dir import ModelDir
from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import CheckpointWriter, file_hash
from ..text.detokenizer import load_tokenizer
from .finetune_plan import FinetunePlan, from_checkpoint, plan_finetune
from .finetune_publish import check, finishing, publish
from .finetune_start import load_start
from .output import resuming, state_dir, weight_bytes


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    """The outcome of :func:`finetune`.

    Attributes:
        plan: what was asked for, resolved: directories, recipe, device, number of weights.
        written: whether this process wrote ``out``: not after a dry run, and of several processes only the first.
        steps: optimizer steps. evaluations: the held-out loss over the run, the start included; empty after a dry run.
        best: the evaluation whose state was kept; None after a dry run.
        original_nll: of the original model on the held-out text, nats per predicted token.
        trained_perplexity, packed_perplexity: of the trained weights in float32 and of the packed checkpoint on
            trirun's kernels, on the same held-out windows.
        bytes_before, bytes_after: of the weight files of model and checkpoint; 0 where nothing was written.
        seconds_before, seconds_training, seconds_after: until the first step, of training, and from its end to the
            checked checkpoint; the first two over all sittings of a run that was stopped.
        seconds: of wall time, of this sitting.
    """

    plan: FinetunePlan
    written: bool = False
    steps: int = 0
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    best: Evaluation | None = None
    original_nll: float = math.nan
    trained_perplexity: float = math.nan
    packed_perplexity: float = math.nan
    bytes_before: int = 0
    bytes_after: int = 0
    seconds_before: float = 0.0
    seconds_training: float = 0.0
    seconds_after: float = 0.0
    seconds: float = 0.0

    @property
    def out(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.out

    @property
    def tokens(self) -> int:
        """Tokens that were trained on, over all devices."""
        return self.steps * self.plan.recipe.batch * self.plan.recipe.seqlen

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of each trained weight, scales included."""
        return self.plan.bits_per_weight

    @property
    def original_perplexity(self) -> float:
        """Of the original model on the held-out text."""
        return math.exp(self.original_nll)

    @property
    def perplexity(self) -> float:
        """Of the kept state on the held-out text; NaN after a dry run."""
        return math.nan if self.best is None else math.exp(self.best.nll)


def finetune(
    model: str | Path,
    out: str | Path,
    *,
    method: str = "learned",
    recipe: TrainRecipe | str | Path | None = None,
    data: Sequence[str] = (),
    device: str = "auto",
    compiled: bool | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    progress: ProgressCallback = silent,
    started: float | None = None,
    **settings: Any,
) -> FinetuneReport:
    """Train a model on its grid to predict what the original predicts, and write the packed checkpoint.

    ::

        report = finetune("llama", "llama-ternary", data=["corpus.txt"], minutes=10)
        print(report.original_perplexity, report.packed_perplexity)

    Until the checkpoint is published nothing appears at ``out``. Of several processes that ``accelerate launch`` or
    ``torchrun`` started each calls this with the same arguments; the first one reports progress and writes.

    Args:
        model: the original, a Hugging Face model directory. out: the checkpoint directory to write.
        method: ``learned`` (a scale per group), ``trilm`` (one per matrix) or ``bitnet`` (so, and int8 activations).
        recipe: a recipe, or a YAML file that holds one, in the method's place.
        data: sources of text, see :func:`trirun_gptq.calibration.load`; none takes the excerpt that ships with trirun.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. compiled: fuse with ``torch.compile``; None does on a GPU.
        overwrite: replace a non-empty ``out``, and the state that a stopped run of another kind has left beside it.
        resume: keep the run's state in ``OUT.state`` until the checkpoint is complete, and continue from there.
        dry_run: check everything and stop. Nothing is written.
        progress: called with a :class:`FinetunePlan`, then with the events of
            :func:`trirun_gptq.train.model.train_model`.
        started: ``time.perf_counter()`` from which ``minutes`` count; None is now.
        settings: keys of :class:`~trirun_gptq.train.recipe.TrainRecipe`, such as ``init``, ``steps``, ``minutes``,
            ``batch`` and ``lr``; they win over the recipe, None leaves a key to it.

    Raises:
        UsageError, InputError, QuantizationError: an argument, the model, the recipe, the text or the output does not
            fit, or the loss is not finite.
        CheckFailed: the packed checkpoint, now at ``OUT.failed``, does not answer as the trained weights do.
        KeyboardInterrupt: the run was stopped; with ``resume`` the same call continues it.
    """
    started = time.perf_counter() if started is None else started
    if not ranks.launched_first():
        progress = silent
    plan = plan_finetune(
        Path(model),
        Path(out),
        method=method,
        recipe=recipe,
        settings=settings,
        data=data,
        device=device,
        compiled=compiled,
        overwrite=overwrite,
        progress=progress,
    )
    progress(plan)
    if dry_run:
        return FinetuneReport(plan)
    with resuming():
        return _run(plan, progress, resume, started)


def _run(plan: FinetunePlan, progress: ProgressCallback, resume: bool, started: float) -> FinetuneReport:
    """Train as planned, publish the checkpoint, and check it."""
    workers = Workers(torch.device(plan.device))
    if not workers.first:
        trained, _ = _train(plan, progress, workers, resume, started)
        return _report(plan, trained, started)
    # Entered before anything is computed: a second run to the same place would share this one's state.
    with CheckpointWriter(plan.out, ModelDir(plan.model), overwrite=plan.overwrite) as writer:
        trained, held_out = _train(plan, progress, workers, resume, started)
        trained_at = time.perf_counter()
        publish(plan, trained.student, writer)
        first, second = check(plan, trained.student, held_out)
        if resume:
            shutil.rmtree(state_dir(plan.out), ignore_errors=True)
    return dataclasses.replace(
        _report(plan, trained, started),
        written=True,
        trained_perplexity=first,
        packed_perplexity=second,
        bytes_before=weight_bytes(plan.model),
        bytes_after=weight_bytes(plan.out),
        seconds_after=time.perf_counter() - trained_at,
        seconds=time.perf_counter() - started,
    )


def _report(plan: FinetunePlan, trained: Trained, started: float) -> FinetuneReport:
    """What is known once training is over."""
    progress = trained.progress
    return FinetuneReport(
        plan,
        steps=progress.step,
        evaluations=progress.evaluations,
        best=next(evaluation for evaluation in progress.evaluations if evaluation.step == progress.best),
        original_nll=trained.original_nll,
        seconds_before=progress.others,
        seconds_training=progress.seconds,
        seconds=time.perf_counter() - started,
    )


def _train(
    plan: FinetunePlan, progress: ProgressCallback, workers: Workers, resume: bool, started: float
) -> tuple[Trained, Tensor]:
    """The outcome, and the held-out windows int64 [windows, seqlen]."""
    recipe, source, directory = plan.recipe, TensorSource(plan.model), state_dir(plan.out)
    tokenizer = load_tokenizer(plan.model)
    stream, held_out = load_text(plan.data, tokenizer, recipe.seqlen, recipe.held_out, recipe.seed)
    state = None
    if resume:
        state = TrainState(directory, _fingerprint(plan, source, stream, workers), replace=plan.overwrite)

    def begin(student: Student) -> None:
        if from_checkpoint(recipe):
            start = load_start(Path(recipe.init), student)
        elif recipe.method == "absmean":
            start = {}
        elif recipe.init == "gptq":
            # Every process walks the blocks together: all of them must find the same ones finished.
            kept = directory / "start" if resume else None
            start = starts.gptq(plan.model, recipe, stream, workers.device, kept, progress)
        else:
            start = starts.nearest(source, plan.grids, workers.device)
        student.begin(source, start)

    trained = train_model(
        plan.model,
        recipe,
        plan.grids,
        begin,
        stream,
        held_out,
        progress,
        workers=workers,
        compiled=plan.compiled,
        state=state,
        started=started,
        finishing=lambda student: finishing(plan, student, held_out),
    )
    return trained, held_out


def _fingerprint(plan: FinetunePlan, source: TensorSource, stream: Tensor, workers: Workers) -> dict[str, str]:
    """What must be equal for a stopped run to be continued."""
    # The schedule follows the clock, so a stopped run may be given more minutes.
    recipe = dataclasses.replace(plan.recipe, minutes=float(plan.recipe.minutes > 0))
    begin = "".join(map(file_hash, Checkpoint(recipe.init).files)) if from_checkpoint(recipe) else ""
    return fingerprint(source, recipe, [stream], workers.device) | {
        "start": begin,
        "compute": f"{'compiled' if plan.compiled else 'eager'}, {workers.count} processes",
    }
