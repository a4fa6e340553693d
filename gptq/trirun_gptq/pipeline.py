"""A model, block by block: read, calibrate, quantize, hand over, forget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .block.cuda_graph import CannotRecord
from .block.walk import BlockResult, BlockRun
from .errors import QuantizationError
from .layer.loops_torch import has_triton
from .layer.quantized import Quantized
from .model.activations import Batch, Placement, capture, halve, make_batches
from .model.loader import Skeleton, TensorSource, linear_layers
from .model.writer import Writer, copy_rest, write_block
from .recipe import Recipe
from .run import distributed as ranks
from .run.memory import plan_memory
from .run.preflight import require_calibration, require_group_sizes, try_block
from .run.profile import Costs, peak_host_bytes
from .run.progress import BlockStarted, Planned, ProgressCallback, Stage, Warned, silent
from .run.report import Predictions, Report
from .run.resume import RunState, fingerprint
from .whole.head import Head, compare
from .whole.training import Blocks, Job, tune

T = TypeVar("T")


def quantize_model(
    model_dir: str | Path,
    recipe: Recipe,
    calibration: list[Tensor],
    writer: Writer,
    progress: ProgressCallback = silent,
    *,
    device: torch.device | str = "cpu",
    state_dir: str | Path | None = None,
    dry_run: bool = False,
) -> Report:
    """Quantize the linear layers of a Hugging Face decoder model, streaming one block at a time.

    Every layer is solved by GPTQ (:mod:`trirun_gptq.layer.gptq`) on inputs that the layers before it already changed;
    blocks, then the whole model, are trained where the recipe says so (:mod:`trirun_gptq.block.reconstruct`,
    :mod:`trirun_gptq.whole.training`).

    The writer receives every tensor of the result: for each quantized module ``<name>.weight`` (int32 tile64 words),
    ``<name>.weight_scale`` (fp16), ``<name>.weight_zero`` (fp16, real-zero grids only) and ``<name>.bias`` where there
    is one; every other tensor of the source (embeddings, norms, lm_head, layers left as they are) unchanged, in its
    own dtype. A tied lm_head stays tied: it is not written when the source does not have it.

    Args:
        model_dir: a directory with config.json and safetensors (one file, or shards with their index).
        recipe: see :class:`~trirun_gptq.recipe.Recipe`.
        calibration: token ids, int64 [length] each, ``recipe.samples + recipe.held_out`` of them; the last
            ``held_out`` decide what is kept and are never trained on. See :func:`~trirun_gptq.calibration.load`.
        writer: see above.
        progress: see :mod:`trirun_gptq.run.progress`. Its events, in this order: ``MemoryPlan``, ``Planned``,
            ``Preflight`` where there was one, and for every block ``BlockStarted``, a ``ModuleReport`` for each of its
            layers, and ``BlockReport``; ``Stage`` and ``Warned`` at any time.
        device: where blocks are computed.
        state_dir: where finished blocks and activations are recorded, so that a killed run resumes; None records
            nothing. A state of another model, recipe or calibration is refused, not overwritten.
        dry_run: end after the preflight: one block, end to end, on one batch. Nothing is written.

    Returns:
        Losses, times and memory; ``report.modules`` has each quantized module's name and spec for config.json.

    Raises:
        QuantizationError: the model has no list of decoder layers, a tensor is missing, of another shape or not finite,
            a group size does not divide k, or a Hessian cannot be factored.
    """
    device = torch.device(device)
    source = TensorSource(model_dir)
    skeleton = Skeleton(source)
    skeleton.require_tensors()
    require_calibration(calibration, recipe, skeleton)
    require_group_sizes(skeleton, recipe)
    if device.type == "cuda" and not has_triton():
        progress(Warned("Triton is not installed: the solver runs as PyTorch calls, many times slower on a GPU"))
    costs = Costs(device)
    parts = [ranks.share(part) for part in (calibration[: recipe.samples], calibration[recipe.samples :])]
    if not parts[0] or (recipe.held_out and not parts[1]):
        raise QuantizationError(f"{ranks.world()} processes need at least as many samples, and as many held out")
    report = Report(tokens=int(ranks.total_of(sum(map(len, parts[0])))[0]), stages=costs.stages)
    report.memory = plan_memory(skeleton, recipe, sum(map(len, parts[0] + parts[1])), device)
    progress(report.memory)
    modules = sum(len(linear_layers(block)) for block in skeleton.blocks)
    progress(Planned(len(skeleton.blocks), modules, report.tokens))

    state = RunState(state_dir, fingerprint(source, recipe, calibration, device)) if state_dir is not None else None
    with costs.stage("embed"):
        train, held_out = _embed(skeleton, parts, recipe, report.memory.place, progress)
    walk = _Walk(skeleton, train, held_out, recipe, progress, state, costs)
    if dry_run or device.type == "cuda":
        # Memory is what a GPU lacks; a CPU's time is better spent on the run itself.
        with costs.stage("preflight"):
            report.preflight = walk.retrying(
                lambda: try_block(skeleton, walk.train, walk.held_out, recipe, walk.record)
            )
        progress(report.preflight)
        if dry_run:
            return report
    copy_rest(source, skeleton, writer)
    waiting = _quantize_blocks(walk, report, writer)
    if walk.held_out:
        waiting = _finish(walk, waiting, report)
    for index, quantized in enumerate(waiting):
        _write(walk, index, quantized, writer)
    report.peak_bytes = peak_host_bytes()
    return report


def _quantize_blocks(walk: _Walk, report: Report, writer: Writer) -> Blocks:
    """All blocks, one after the other; those that are to be trained further, on the CPU at a byte per weight."""
    skeleton = walk.skeleton
    waiting: Blocks = []
    for index in range(len(skeleton.blocks)):
        name = skeleton.block_name(index)
        walk.progress(BlockStarted(index, len(skeleton.blocks), name))
        result = walk.block(index)
        if walk.recipe.end_to_end:
            # Scales still change when the model is trained end to end.
            waiting.append({name: weight.to("cpu") for name, weight in result.quantized.items()})
        else:
            _write(walk, index, result.quantized, writer)
        report.modules += result.modules
        report.kept += [f"{name}.{layer}" for layer in result.kept]
        report.blocks.append(result.report)
        walk.progress(result.report)
    return waiting


def _write(walk: _Walk, index: int, quantized: dict[str, Quantized], writer: Writer) -> None:
    skeleton = walk.skeleton
    with walk.costs.stage("write"):
        write_block(skeleton.source, skeleton.block_name(index), quantized, writer)


def _finish(walk: _Walk, waiting: Blocks, report: Report) -> Blocks:
    """End-to-end training where the recipe asks for it, and how the result predicts held-out text.

    Returns:
        The waiting blocks, trained.
    """
    recipe, progress, costs = walk.recipe, walk.progress, walk.costs
    memory, phases = report.memory, [False] if recipe.e2e_steps else []
    assert memory is not None
    head = Head(walk.skeleton, memory.device)
    if recipe.e2e_code_steps and memory.trains_codes:
        phases.append(True)
    elif recipe.e2e_code_steps:
        message = "too little memory to train all codes end to end: they stay as the blocks' training left them"
        progress(Warned(message))

    def train(codes: bool, blocks: Blocks) -> tuple[Blocks, Predictions, Predictions]:
        job = Job(head, walk.train, walk.held_out, recipe, codes, memory.recomputes, walk.record)
        return tune(job, blocks, lambda done, total: progress(Stage("e2e", done, total)))

    for codes in phases:
        with costs.stage("end to end"):
            attempt = functools.partial(train, codes, waiting)
            waiting, before, report.predictions = walk.retrying(attempt)
            report.before_e2e = report.before_e2e or before
    if not phases:
        with costs.stage("compare"):
            report.predictions = walk.retrying(lambda: compare(head, walk.held_out))
    found = report.predictions
    if found is not None and not math.isfinite(found.divergence):
        raise QuantizationError(
            "the model's predictions on held-out calibration text are not finite numbers: perplexity "
            f"{found.original_perplexity:g} before quantization, {found.perplexity:g} after"
        )
    return waiting


class _Walk:
    """The blocks in turn; activations move on with each, and into smaller batches when memory runs out."""

    def __init__(
        self,
        skeleton: Skeleton,
        train: list[Batch],
        held_out: list[Batch],
        recipe: Recipe,
        progress: ProgressCallback,
        state: RunState | None,
        costs: Costs,
    ) -> None:
        self.skeleton, self.train, self.held_out = skeleton, train, held_out
        self.recipe, self.progress, self.state, self.costs = recipe, progress, state, costs
        self.record = True

    def block(self, index: int) -> BlockResult:
        """One block quantized, or taken from the state of a run that was stopped."""
        finished = self.state.load(index) if self.state is not None else None

        def attempt() -> BlockResult:
            batches = self.train, self.held_out
            run = BlockRun(self.skeleton, index, *batches, self.recipe, self.progress, self.costs, self.record)
            if finished is None:
                return run.run()
            run.restore(finished.quantized)
            return finished

        result = self.retrying(attempt)
        if finished is not None:
            for module in finished.modules:
                self.progress(module)
        elif self.state is not None and ranks.rank() == 0:
            with self.costs.stage("write"):
                self.state.save(index, result)
        return result

    def retrying(self, attempt: Callable[[], T]) -> T:
        """The attempt's result; when a GPU runs out of memory, once more with batches half as large; when a training
        step cannot be recorded as a CUDA graph, once more without.

        An attempt changes the batches' activations at its very end or not at all.
        """
        while True:
            # What one block leaves in the allocator's cache is cut to other sizes than the next one's first layers ask
            # for. So each begins with what the preflight began with, and a card that two programs share is shared.
            torch.cuda.empty_cache()
            try:
                return attempt()
            except CannotRecord as error:
                self.record = False
                self.progress(Warned(f"training steps are launched kernel by kernel, more slowly: {error}"))
                continue
            except torch.OutOfMemoryError:
                sequences = max(len(batch.tokens) for batch in [*self.train, *self.held_out])
                # Several processes could not agree on a retry that only one of them needs.
                if sequences == 1 or ranks.world() > 1:
                    raise
            # Outside the handler, whose traceback keeps the failed attempt's tensors alive.
            self.progress(Warned(f"out of GPU memory with {sequences} sequences at a time; again with half as many"))
            self.train[:] = halve(self.skeleton, self.train)
            self.held_out[:] = halve(self.skeleton, self.held_out)


def _embed(
    skeleton: Skeleton, sequences: list[list[Tensor]], recipe: Recipe, place: Placement, progress: ProgressCallback
) -> tuple[list[Batch], list[Batch]]:
    """Both parts of the calibration sequences, embedded."""
    skeleton.load_rest(place.device)
    parts = make_batches(sequences[0]), make_batches(sequences[1], recipe.samples)
    total = len(parts[0]) + len(parts[1])
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(Stage("embed", done, total))

    train, held_out = (capture(skeleton, part, place, step) for part in parts)
    return train, held_out
