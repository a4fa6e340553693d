"""A model, block by block: read, calibrate, quantize, hand over, forget."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from .errors import QuantizationError
from .layer.loops_torch import has_triton
from .layer.quantized import Quantized
from .model.activations import Batch, Placement, capture, make_batches
from .model.loader import Skeleton, TensorSource, linear_layers
from .model.writer import Writer, copy_rest, write_block
from .recipe import Recipe
from .run import distributed as ranks
from .run.estimate import plan_time
from .run.memory import MemoryPlan, plan_memory
from .run.preflight import Trial, block_sizes, require_calibration, require_finite, require_group_sizes, try_block
from .run.profile import Costs, peak_host_bytes
from .run.progress import BlockStarted, Planned, ProgressCallback, Stage, Warned, silent
from .run.report import Predictions, Report
from .run.resume import RunState, fingerprint
from .run.walk import Walk
from .whole.head import Head, compare
from .whole.rehearsal import StepTime, rehearse_comparison, rehearse_training
from .whole.training import Blocks, Job, tune


def quantize_model(
    model_dir: str | Path,
    recipe: Recipe,
    calibration: list[Tensor],
    writer: Writer,
    progress: ProgressCallback = silent,
    *,
    device: torch.device | str = "cpu",
    state_dir: str | Path | None = None,
    replace_state: bool = False,
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
            ``Preflight`` and ``TimePlan`` where one block was tried, and for every block ``BlockStarted``, a
            ``ModuleReport`` for each of its layers, and ``BlockReport``; ``Stage`` and ``Warned`` at any time.
        device: where blocks are computed.
        state_dir: where finished blocks and activations are recorded, so that a killed run resumes; None records
            nothing. A state of another model, recipe or calibration is refused.
        replace_state: remove such a state instead.
        dry_run: end after the preflight: one block, end to end, on one batch. Nothing is written.

    Returns:
        Losses, times and memory; ``report.modules`` has each quantized module's name and spec for config.json.

    Raises:
        QuantizationError: the model has no list of decoder layers, a tensor is missing, of another shape or not finite,
            a group size does not divide k, its head cannot be run (all that before the first block), or a Hessian
            cannot be factored.
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

    state = None
    if state_dir is not None:
        # Blocks do not depend on what follows them: a run whose end failed may be ended in another way.
        blocks_alone = recipe.without_end_to_end()
        state = RunState(state_dir, fingerprint(source, blocks_alone, calibration, device), replace=replace_state)
    with costs.stage("scan"):
        require_finite(source, progress)
    with costs.stage("embed"):
        train, held_out = _embed(skeleton, parts, recipe, report.memory.place, progress)
    walk = Walk(skeleton, train, held_out, recipe, progress, state, costs)
    with costs.stage("preflight"):
        comparison = 0.0
        if held_out:
            comparison = walk.retrying(lambda: rehearse_comparison(skeleton, walk.held_out[0]))
        # Memory is what a GPU lacks. A CPU's time is better spent on the run itself, unless that is a long one.
        if dry_run or device.type == "cuda" or recipe.refine_steps or recipe.end_to_end:
            trial = walk.retrying(lambda: try_block(skeleton, walk.train, walk.held_out, recipe, walk.records))
            training = _try_training(walk, report.memory, trial)
            report.preflight = trial.preflight
    if report.preflight is not None:
        progress(report.preflight)
        spent = {name: cost.seconds for name, cost in costs.stages.items()}
        finished = [state is not None and index in state for index in range(len(skeleton.blocks))]
        parts_used = (walk.train, walk.held_out)
        sizes = block_sizes(skeleton)
        report.time = plan_time(trial, sizes, finished, parts_used, recipe, training, comparison, spent)
        progress(report.time)
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


def _quantize_blocks(walk: Walk, report: Report, writer: Writer) -> Blocks:
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


def _write(walk: Walk, index: int, quantized: dict[str, Quantized], writer: Writer) -> None:
    skeleton = walk.skeleton
    with walk.costs.stage("write"):
        write_block(skeleton.source, skeleton.block_name(index), quantized, writer)


def _finish(walk: Walk, waiting: Blocks, report: Report) -> Blocks:
    """End-to-end training where the recipe asks for it, and how the result predicts held-out text.

    Returns:
        The waiting blocks, trained.
    """
    recipe, progress, costs, memory = walk.recipe, walk.progress, walk.costs, report.memory
    assert memory is not None
    head, phases = Head(walk.skeleton, memory.device), _phases(recipe, memory)
    if recipe.e2e_code_steps and not memory.trains_codes:
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
        report.predictions = _compare(walk, head)
    found = report.predictions
    if found is not None and not math.isfinite(found.divergence):
        raise QuantizationError(
            "the model's predictions on held-out calibration text are not finite numbers: perplexity "
            f"{found.original_perplexity:g} before quantization, {found.perplexity:g} after"
        )
    return waiting


def _phases(recipe: Recipe, memory: MemoryPlan) -> list[bool]:
    """End-to-end training of the scales (False), then of the codes too (True), as far as the recipe and memory go."""
    return [False] * (recipe.e2e_steps > 0) + [True] * (recipe.e2e_code_steps > 0 and memory.trains_codes)


def _try_training(walk: Walk, memory: MemoryPlan, trial: Trial) -> list[tuple[int, StepTime]]:
    """Of each phase of end-to-end training, how many steps it has and how long one takes."""
    recipe, found = walk.recipe, []
    for codes in _phases(recipe, memory):

        def attempt(codes: bool = codes) -> StepTime:
            # Asked for anew each time: a retry has smaller batches.
            block = (walk.skeleton, trial.index, trial.quantized, walk.train[0])
            return rehearse_training(*block, recipe, codes=codes, recompute=memory.recomputes, record=walk.records)

        found.append((recipe.e2e_code_steps if codes else recipe.e2e_steps, walk.retrying(attempt)))
    return found


def _compare(walk: Walk, head: Head) -> Predictions | None:
    """Both models' predictions of held-out text; None, with a warning, where this fails: all blocks are quantized by
    now, and a number that is missing must not cost them."""
    try:
        with walk.costs.stage("compare"):
            return walk.retrying(lambda: compare(head, walk.held_out))
    except Exception as error:
        # Other processes wait for this one's sums.
        if ranks.world() > 1:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        walk.progress(Warned(f"the result was not compared with the original on held-out text: {reason[:300]}"))
        return None


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
