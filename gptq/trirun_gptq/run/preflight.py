"""What would stop a run after an hour stops it in its first minute: checks of the input, and a trial of one block."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block.cuda_graph import WARMUP, recordable
from ..block.reconstruct import EVALUATIONS, block_error
from ..block.walk import BlockRun
from ..errors import QuantizationError
from ..layer.quantized import Quantized
from ..model.activations import Batch, compute, run_block, shares
from ..model.loader import Skeleton, TensorSource, linear_layers
from ..model.mxfp4 import LARGEST_SCALE, SCALES
from ..recipe import Recipe
from .profile import Costs, StageCost
from .progress import Event, ProgressCallback, Stage, silent
from .report import Preflight

NAMED = 8  # defects of one kind that an error lists
# Of refinement where steps are recorded: most that repeat the recorded one are not followed by an evaluation.
STEPS = 3 * EVALUATIONS
FEW_STEPS = 4  # else; the first is not timed, and an evaluation follows each
SHORT_S = 1.0  # a trial on a GPU that takes no longer is made twice: the host may have done something else meanwhile
EVALUATIONS_AROUND = 3  # of a block's held-out error, beside those while it is trained


def require_calibration(calibration: list[Tensor], recipe: Recipe, skeleton: Skeleton) -> None:
    """The calibration sequences are as many as the recipe asks for, and the model can read each of them.

    Args:
        calibration: int64 [length] each, ``recipe.samples + recipe.held_out`` of them.

    Raises:
        QuantizationError: there are fewer or more, or one has another dtype or shape, is longer than the model's
            context, or has tokens outside of its vocabulary.
    """
    needed = recipe.samples + recipe.held_out
    if len(calibration) != needed:
        raise QuantizationError(
            f"{len(calibration)} calibration sequences were given; the recipe asks for {recipe.samples} and "
            f"{recipe.held_out} held out"
        )
    vocabulary = skeleton.model.get_input_embeddings().weight.shape[0]
    context = getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)
    for i, sequence in enumerate(calibration):
        if sequence.dim() != 1 or sequence.dtype != torch.int64 or len(sequence) < 2:
            raise QuantizationError(
                f"calibration sequence {i} must be int64 [length ≥ 2], got {sequence.dtype} {list(sequence.shape)}"
            )
        if context is not None and len(sequence) > context:
            raise QuantizationError(
                f"calibration sequence {i} has {len(sequence)} tokens; the model's context ends at {context}"
            )
        low, high = int(sequence.min()), int(sequence.max())
        if low < 0 or high >= vocabulary:
            raise QuantizationError(
                f"calibration sequence {i} has tokens {low}..{high}; the model's vocabulary is 0..{vocabulary - 1}"
            )


def require_finite(source: TensorSource, progress: ProgressCallback) -> None:
    """No stored tensor of a model has a value that is NaN or infinite. Reads every weight file once.

    Args:
        source: the model's files; tensors that the model does not have are passed over.
        progress: receives ``Stage("scan", ...)`` per tensor.

    Raises:
        QuantizationError: one has; all such tensors are named.
    """
    bad = []
    stored = [name for group in source.stored.groups if group.targets for name in group.sources]
    for done, name in enumerate(stored):
        progress(Stage("scan", done, len(stored)))
        value = source.tensor(name)
        if value.numel() and value.dtype.is_floating_point and not _is_finite(value):
            bad.append(f"{name}: {int((~torch.isfinite(value)).sum())} of {value.numel()} values")
        if name.endswith(SCALES) and int((value > LARGEST_SCALE).sum()):
            bad.append(f"{name}: {int((value > LARGEST_SCALE).sum())} of {value.numel()} scales")
        source.release()
    progress(Stage("scan", len(stored), len(stored)))
    if bad:
        raise QuantizationError(f"{_listed(bad)} are NaN or infinite")


def _listed(defects: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(defects) - NAMED
    return "; ".join(defects if more <= 0 else [*defects[:NAMED], f"{more} more"])


def _is_finite(value: Tensor) -> bool:
    # Of the extremes: they take no memory beside a matrix that may be the largest there is.
    return all(map(math.isfinite, map(float, torch.aminmax(value))))


def require_group_sizes(skeleton: Skeleton, recipe: Recipe) -> None:
    """Every layer's group size divides its k.

    Raises:
        QuantizationError: one does not; all such layers are named.
    """
    bad = []
    for index, block in enumerate(skeleton.blocks):
        for path, layer in linear_layers(block).items():
            name = f"{skeleton.block_name(index)}.{path}"
            grid = recipe.choice(name)
            try:
                if grid is not None:
                    grid.spec.groups(layer.in_features)
            except ValueError as error:
                bad.append(f"{name}: {error}")
    if bad:
        raise QuantizationError(f"{_listed(bad)}; choose another group size or override these layers")


@dataclass(frozen=True, slots=True)
class Trial:
    """One block quantized on one batch.

    Attributes:
        preflight: what it took. index: which block. quantized: its layers, which few calibration tokens have seen.
        stages: cost by stage.
        refine_step: seconds of one training step, by every method together; 0 where blocks are not trained.
        refine_start: seconds of training beside steps and evaluations: first steps, and recording them.
        evaluation: seconds of the block's held-out error on the batch; 0 without held-out sequences.
        pack: seconds to pack the layers.
    """

    preflight: Preflight
    index: int
    quantized: dict[str, Quantized]
    stages: dict[str, StageCost]
    refine_step: float
    refine_start: float
    evaluation: float
    pack: float


def try_block(skeleton: Skeleton, train: list[Batch], held_out: list[Batch], recipe: Recipe, record: bool) -> Trial:
    """Quantize the largest block that runs alone on one batch, refine it for a few steps, and forget it.

    Args:
        train, held_out: all batches of the run; the first of each is used, and left as it is.
        record: refine by CUDA graphs where blocks can be.

    Raises:
        QuantizationError: whatever would stop the run itself. torch.OutOfMemoryError: a batch is too large.
        CannotRecord: a step cannot be a CUDA graph; with ``record`` only.
    """
    index = _largest_alone(skeleton, train[0])
    device = train[0].place.device
    record = record and recordable(train[:1], [[0]], [skeleton.blocks[index]])
    steps = STEPS if record else FEW_STEPS
    short = dataclasses.replace(recipe, refine_steps=min(recipe.refine_steps, steps))
    if device.type == "cuda":
        # Libraries load and kernels are compiled the first time: seconds that no later block takes.
        first = dataclasses.replace(recipe, refine_steps=min(recipe.refine_steps, WARMUP + 1))
        BlockRun(skeleton, index, _first(train), _first(held_out), first, silent, Costs(device), record).run()

    def timed() -> tuple[BlockRun, dict[str, Quantized], Costs, list[float]]:
        costs, refined = Costs(device), list[float]()

        def listen(event: Event) -> None:
            if isinstance(event, Stage) and event.name == "refine":
                refined.append(now(device))

        block = BlockRun(skeleton, index, _first(train), _first(held_out), short, listen, costs, record)
        return block, block.run().quantized, costs, refined

    block, quantized, costs, refined = timed()
    if device.type == "cuda" and costs.seconds < SHORT_S:
        before = costs, refined
        del block, quantized  # as at the first time, no other block is in memory
        block, quantized, costs, refined = timed()
        costs, refined = min(before, (costs, refined), key=lambda each: each[0].seconds)
    held_out, evaluation = block.held_out, 0.0
    for _ in range(2 if held_out else 0):
        started = now(device)
        block_error(block.block, index, held_out, [held_out[0].original])
        evaluation = now(device) - started
    started = now(device)
    for weight in quantized.values():
        weight.pack()
    pack = now(device) - started
    found = Preflight(costs.seconds, max(stage.device_bytes for stage in costs.stages.values()))
    step = _step_seconds(refined, short.refine_steps, evaluation)
    start = 0.0
    if short.refine_steps:
        evaluations = len(recipe.engines) * (min(short.refine_steps, EVALUATIONS) + EVALUATIONS_AROUND) * evaluation
        start = max(costs.stages["refine"].seconds - short.refine_steps * step - evaluations, 0.0)
    return Trial(found, index, quantized, costs.stages, step, start, evaluation, pack)


def _first(batches: list[Batch]) -> list[Batch]:
    """The first batch, to be worked on in the place of the run's own."""
    return [dataclasses.replace(batch, shared={}) for batch in batches[:1]]


def _largest_alone(skeleton: Skeleton, batch: Batch) -> int:
    """The last of the largest blocks, since targets are not corrected before the first one, that find all they need
    where no other has run."""
    sizes = block_sizes(skeleton)
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i), reverse=True)
    return next(index for index in order if _runs_alone(skeleton, index, batch))


def _runs_alone(skeleton: Skeleton, index: int, batch: Batch) -> bool:
    if not shares(batch.calls[index][1]):
        return True
    block = skeleton.load_block(index, batch.place.device)
    try:
        with torch.no_grad(), compute(batch.place.device):
            run_block(block, index, *_first([batch]))
    except KeyError:
        # Of what earlier blocks share.
        return False
    return True


def block_sizes(skeleton: Skeleton) -> list[int]:
    """Parameters of each block."""
    return [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]


def now(device: torch.device) -> float:
    """Seconds on the wall's clock once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def step_time(ends: list[float]) -> float:
    """Seconds of a typical step, from when two or more ended: a median, since others may use the device meanwhile."""
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _step_seconds(times: list[float], steps: int, evaluation: float) -> float:
    """Of one training step by every method, from when each step ended, and what followed those few steps that were
    evaluated each."""
    total = 0.0
    for first in range(0, len(times), steps or 1):
        ends = times[first : first + steps]
        # What is done the first time takes longer, up to the step that is recorded.
        start, spent = (WARMUP + 1, 0.0) if steps == STEPS else (0, evaluation)
        if len(ends) > start + 1:
            total += max(step_time(ends[start:]) - spent, 0.0)
    return total
