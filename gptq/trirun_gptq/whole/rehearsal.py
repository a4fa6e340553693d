"""The end of a run, tried before its beginning: the comparison with the original, and steps of end-to-end training."""

from __future__ import annotations

import dataclasses
import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..block.cuda_graph import WARMUP, Recorded, recordable
from ..layer.quantized import Quantized
from ..model.activations import Batch, answer
from ..model.loader import Skeleton
from ..recipe import Recipe
from ..run.preflight import now, step_time
from .head import Head, compare, replaced_forwards
from .training import Blocks, Job, tune

STEPS = 4  # of training, the first of which is not timed, nor the last, which an evaluation follows
GRAPH_STEPS = WARMUP + 7  # where steps are recorded, up to which none is timed
FEW = 8  # tokens, where what is computed does not matter


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of end-to-end training: of one block, and of all that is no block (embeddings, heads); and of
    what comes before that time is reached: loading, first steps, recording."""

    block: float
    rest: float
    start: float


def rehearse_comparison(skeleton: Skeleton, batch: Batch) -> float:
    """Compare both models' predictions on one sequence before any block is quantized, so that a model whose head cannot
    be run is refused now and not at the end.

    Args:
        skeleton: its embeddings are filled in; its head is, for as long as this takes.
        batch: any, with the hidden states before the first block.

    Returns:
        Seconds per token.

    Raises:
        QuantizationError: the model has no output head, or one that cannot be run on hidden states.
    """
    head = Head(skeleton, batch.place.device)
    # What the model's class takes, and libraries, are found the first time. One sequence does not keep a GPU busy.
    gpu = batch.place.device.type == "cuda"
    try:
        for part in [batch, batch] if gpu else [_part(batch, FEW), _part(batch, batch.tokens.shape[1])]:
            started = time.perf_counter()
            compare(head, [part])
        return (time.perf_counter() - started) / part.tokens.numel()
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
    graphs = record and recordable([batch], [[0]], skeleton.blocks)
    steps = GRAPH_STEPS if graphs else STEPS
    short = dataclasses.replace(recipe, e2e_steps=steps, e2e_code_steps=steps)
    times: list[float] = []
    try:
        rest = _time_rest(head, batch, graphs)
        job = Job(head, [batch], [_part(batch, FEW)], short, codes, recompute, record, only=index)
        blocks: Blocks = [{} for _ in skeleton.blocks]
        blocks[index] = quantized
        others = [block for other, block in enumerate(skeleton.blocks) if other != index]

        def hand_on(*args: Any, **named: Any) -> Any:
            return answer(args[0] if args else named["hidden_states"], head.style or 0)

        # Libraries that load meanwhile are no part of the run, which finds them there.
        for _ in range(2 if graphs else 1):
            times.clear()
            started = now(device)
            with replaced_forwards(others, [hand_on] * len(others)):
                tune(job, blocks, lambda done, total: times.append(now(device)))
    finally:
        head.unload()
    # A step that is recorded takes longer than those that repeat it.
    first = WARMUP if graphs else 0
    step = step_time(times[first:-1])
    start = times[first] - started - (first + 1) * step
    return StepTime(max(step - rest, 0.0), min(rest, step), max(start, 0.0))


def _time_rest(head: Head, batch: Batch, graphs: bool) -> float:
    """Seconds of what a step computes beside the blocks: both heads forward, one backward."""
    device = batch.place.device

    def compute(batch: Batch, tokens: Tensor, original: Tensor) -> None:
        part = dataclasses.replace(batch, tokens=tokens)
        states = original.detach().clone().requires_grad_()
        with torch.no_grad():
            teacher = head.logits(part, original).log_softmax(-1)
        F.kl_div(head.logits(part, states).log_softmax(-1), teacher, reduction="sum", log_target=True).backward()

    step = Recorded(compute, device) if graphs else compute
    inputs = batch.tokens.to(device), batch.place.fetch(batch.original)
    times = [now(device)]
    for _ in range(WARMUP + 3 if graphs else 2):
        step(batch, *inputs)
        times.append(now(device))
    return min(after - before for before, after in itertools.pairwise(times))


def _part(batch: Batch, length: int) -> Batch:
    """The beginning of a batch's first sequence."""
    first = (slice(1), slice(length))
    original, quantized = batch.original[first], batch.quantized[first]
    return dataclasses.replace(batch, tokens=batch.tokens[first], original=original, quantized=quantized)
