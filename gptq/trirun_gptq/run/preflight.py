"""One block, end to end, on one batch: what would stop a run after an hour stops it in its first minute."""

from __future__ import annotations

import copy
import dataclasses

from ..block.cuda_graph import WARMUP
from ..block.walk import BlockRun
from ..model.activations import Batch
from ..model.loader import Skeleton
from ..recipe import Recipe
from .profile import Costs
from .progress import Observer, Rehearsal

STEPS = WARMUP + 1  # of refinement: by then the optimizer's moments are in memory, and the step is recorded


def rehearse(skeleton: Skeleton, train: list[Batch], held_out: list[Batch], recipe: Recipe, record: bool) -> Rehearsal:
    """Quantize the largest block on one batch, refine it for a few steps, and forget it.

    Raises:
        QuantizationError: whatever would stop the run itself. torch.OutOfMemoryError: a batch is too large.
        CannotRecord: a step cannot be a CUDA graph; with ``record`` only.
    """
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in skeleton.blocks]
    index = sizes.index(max(sizes))
    short = dataclasses.replace(recipe, refine_steps=min(recipe.refine_steps, STEPS))
    costs = Costs(train[0].place.device)
    train, held_out = ([copy.copy(batch) for batch in batches[:1]] for batches in (train, held_out))
    BlockRun(skeleton, index, train, held_out, short, Observer(), costs, record).run()
    stages = costs.stages.values()
    return Rehearsal(sum(stage.seconds for stage in stages), max(stage.device_bytes for stage in stages))
