"""The end of a run, tried before its beginning: the comparison with the original, and steps of end-to-end training."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..block.cuda_graph import WARMUP
from ..layer.quantized import Quantized
from ..model.activations import Batch, answer
from ..model.loader import Skeleton
from ..recipe import Recipe
from ..run.preflight import now, step_time
from .head import Head, compare, replaced_forwards
from .training import Blocks, Job, tune

STEPS = 3  # of training on a CPU, the first of which is not timed
GRAPH_STEPS = WARMUP + 6  # on a GPU, up to the step that is recorded of which none is timed
FEW = 8  # tokens, where what is computed does not matter


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of end-to-end training: of one block, and of all that is no block (embeddings, heads)."""

    block: float
    rest: float


def rehearse_comparison(skeleton: Skeleton, batch: Batch) -> float:
    """Compare both models' predictions on one sequence before any block is quantized, so that a model whose head cannot
    be run is refused now and not at the end.

    Args:
        skeleton: its embeddings are filled in; its head is, for as long as this takes.
        batch: any; its first sequence is used, with the hidden states before the first block.

    Returns:
        Seconds per token.

    Raises:
        QuantizationError: the model has no output head, or one that cannot be run on hidden states.
    """
    head = Head(skeleton, batch.place.device)
    try:
        # What the model's class takes is found out once, on a few tokens.
        compare(head, [_part(batch, FEW)])
        one = _part(batch, batch.tokens.shape[1])
        started = time.perf_counter()
        compare(head, [one])
        return (time.perf_counter() - started) / one.tokens.numel()
    finally:
        head.unload()


def rehearse_training(
    skeleton: Skeleton,
    index: int,
    quantized: dict[str, Quantized],
    batch: Batch,
    recipe: Recipe,
    *,
    codes: bool,
    recompute: bool,
    record: bool,
) -> StepTime:
    """Some steps of end-to-end training with one block, the others handing on what they get.

    Args:
        index: of the block, whose layers are ``quantized``. batch: what a step trains on. The others: as
            :class:`~trirun_gptq.whole.training.Job` has them.
    """
    device = batch.place.device
    head = Head(skeleton, device)
    graphs = record and device.type == "cuda"
    steps = GRAPH_STEPS if graphs else STEPS
    short = dataclasses.replace(recipe, e2e_steps=steps, e2e_code_steps=steps)
    times: list[float] = []
    try:
        rest = min(_time_rest(head, batch) for _ in range(2))
        job = Job(head, [batch], [_part(batch, FEW)], short, codes, recompute, record, only=index)
        blocks: Blocks = [{} for _ in skeleton.blocks]
        blocks[index] = quantized
        others = [block for other, block in enumerate(skeleton.blocks) if other != index]

        def hand_on(*args: Any, **named: Any) -> Any:
            return answer(args[0] if args else named["hidden_states"], head.style or 0)

        with replaced_forwards(others, [hand_on] * len(others)):
            tune(job, blocks, lambda done, total: times.append(now(device)))
    finally:
        head.unload()
    # A step that is recorded takes longer than those that repeat it.
    start = WARMUP + 1 if graphs else 0
    step = step_time(times[start:])
    return StepTime(max(step - rest, 0.0), min(rest, step))


def _time_rest(head: Head, batch: Batch) -> float:
    """Seconds of what a step computes beside the blocks: both heads forward, one backward."""
    started = now(batch.place.device)
    states = batch.place.fetch(batch.original).detach().clone().requires_grad_()
    with torch.no_grad():
        teacher = head.logits(batch, batch.original).log_softmax(-1)
    F.kl_div(head.logits(batch, states).log_softmax(-1), teacher, reduction="sum", log_target=True).backward()
    return now(batch.place.device) - started


def _part(batch: Batch, length: int) -> Batch:
    """The beginning of a batch's first sequence."""
    first = (slice(1), slice(length))
    original, quantized = batch.original[first], batch.quantized[first]
    return dataclasses.replace(batch, tokens=batch.tokens[first], original=original, quantized=quantized)
