"""What would stop a run after an hour stops it in its first minute: checks of the input, and a trial of one block."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from torch import Tensor

from ..block.cuda_graph import WARMUP
from ..block.walk import BlockRun
from ..errors import QuantizationError
from ..model.activations import Batch
from ..model.experts import stored_as
from ..model.loader import Skeleton, linear_layers
from ..recipe import Recipe
from .profile import Costs
from .progress import ProgressCallback, Stage, silent
from .report import Preflight

NAMED = 8  # defects of one kind that an error lists
STEPS = WARMUP + 1  # of refinement: by then the optimizer's moments are in memory, and the step is recorded


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


def require_finite(skeleton: Skeleton, progress: ProgressCallback) -> None:
    """No parameter of the model has a value that is NaN or infinite. Reads every weight file once.

    Args:
        progress: receives ``Stage("scan", ...)`` per tensor.

    Raises:
        QuantizationError: one has; all such tensors are named.
    """
    source, bad = skeleton.source, []
    names = (name for name, _ in skeleton.model.named_parameters(remove_duplicate=False))
    # Experts that a file holds fused are one tensor there. A tied head need not be stored.
    stored = list(dict.fromkeys(found for name in names if (found := stored_as(name, source)[0]) is not None))
    for done, name in enumerate(stored):
        progress(Stage("scan", done, len(stored)))
        value = source.tensor(name)
        if value.numel() and value.dtype.is_floating_point and not _is_finite(value):
            bad.append(f"{name}: {int((~torch.isfinite(value)).sum())} of {value.numel()} values")
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


def try_block(skeleton: Skeleton, train: list[Batch], held_out: list[Batch], recipe: Recipe, record: bool) -> Preflight:
    """Quantize the largest block on one batch, refine it for a few steps, and forget it.

    Args:
        train, held_out: all batches of the run; the first of each is used, and left as it is.
        record: refine by CUDA graphs where they can be had.

    Raises:
        QuantizationError: whatever would stop the run itself. torch.OutOfMemoryError: a batch is too large.
        CannotRecord: a step cannot be a CUDA graph; with ``record`` only.
    """
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]
    index = sizes.index(max(sizes))
    short = dataclasses.replace(recipe, refine_steps=min(recipe.refine_steps, STEPS))
    costs = Costs(train[0].place.device)
    train, held_out = ([copy.copy(batch) for batch in batches[:1]] for batches in (train, held_out))
    BlockRun(skeleton, index, train, held_out, short, silent, costs, record).run()
    stages = costs.stages.values()
    return Preflight(sum(stage.seconds for stage in stages), max(stage.device_bytes for stage in stages))
