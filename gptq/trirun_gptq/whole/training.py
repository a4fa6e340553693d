"""End-to-end training: the scales of the quantized model, or its codes too, against the original model's predictions.

The blocks were trained one at a time; here the whole model is run, and what is lowered is the divergence of its
next-token distribution from the original's (Chen et al. 2024, "EfficientQAT", E2E-QP, with distillation in place of the
text's own cross entropy, which can be mixed in). Begin with :func:`tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..block.cuda_graph import Recorded, recordable
from ..block.optim import Adam, step_batches
from ..layer.quantized import Quantized
from ..model.activations import Batch, compute
from ..model.loader import Skeleton
from ..recipe import Recipe
from ..run import distributed as ranks
from ..run.report import Predictions
from .head import Head, compare, predict, replaced_forwards
from .layers import CodedLinear, ScaledLinear, StudentLinear

EVALUATIONS = 8  # times per run that the held-out divergence is measured
CLIP = 1.0  # of the gradient's norm
Blocks = list[dict[str, Quantized]]


@dataclass(frozen=True, slots=True)
class Job:
    """One training of the whole model, as :func:`tune` does it.

    Attributes:
        head: of the original model, and of the one that is trained.
        train, held_out: batches with hidden states after the last block.
        codes: train every code and scale; False, the scales (and real zeros) alone.
        recompute: the blocks' activations in the backward pass, instead of keeping them.
        record: steps as CUDA graphs where they can be.
        only: a rehearsal: the one block that is filled in and trained; the caller says what the others compute.
    """

    head: Head
    train: list[Batch]
    held_out: list[Batch]
    recipe: Recipe
    codes: bool
    recompute: bool
    record: bool
    only: int | None = None

    @property
    def device(self) -> torch.device:
        """Of the computation."""
        return self.train[0].place.device

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.recipe.e2e_code_steps if self.codes else self.recipe.e2e_steps

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return self.recipe.e2e_code_lr if self.codes else self.recipe.e2e_lr


def tune(job: Job, blocks: Blocks, progress: Callable[[int, int], None]) -> tuple[Blocks, Predictions, Predictions]:
    """Train the scales of all blocks together, or their codes too.

    The whole quantized model is on the device: a byte per weight, or latents with their gradients and moments.

    Args:
        blocks: the finished blocks.
        progress: called with (steps done, steps).

    Returns:
        The blocks as they end, and the predictions on held-out text before and after; the blocks that came in, and the
        same predictions twice, where training did not lower the divergence.
    """
    skeleton = job.head.skeleton
    try:
        chosen = range(len(blocks)) if job.only is None else [job.only]
        layers = _load_student(
            skeleton, {index: blocks[index] for index in chosen}, job.device, job.recipe if job.codes else None
        )
        kept, before, best = _train(job, layers, progress)
    finally:
        skeleton.unload_blocks()
    if kept is None:
        return blocks, before, before
    named = ({name: kept[f"{index}.{name}"] for name in block} for index, block in enumerate(blocks))
    return list(named), before, best


def _train(
    job: Job, layers: dict[str, StudentLinear], progress: Callable[[int, int], None]
) -> tuple[dict[str, Quantized] | None, Predictions, Predictions]:
    """The best state on held-out text (None: the start), and the predictions of the start and of the best."""
    head, recipe, device, steps = job.head, job.recipe, job.device, job.steps
    skeleton, weight = head.skeleton, recipe.e2e_ce
    groups = [
        {"params": [p for layer in layers.values() for p in layer.trainable.scale_parameters()], "lr": job.rate},
        {"params": [p for layer in layers.values() for p in layer.trainable.code_parameters()], "lr": job.rate},
    ]
    optimizer = Adam([group for group in groups if group["params"]], device)
    order = step_batches(job.train, steps, recipe.seed * 1019)
    # A rehearsal is about the steps.
    interval = max(1, steps // EVALUATIONS) if job.only is None else steps

    def student(batch: Batch) -> Tensor:
        with compute(device):
            return predict(skeleton, batch.tokens.to(device))

    def learn(chosen: list[Batch]) -> None:
        optimizer.zero_grad()
        for batch in chosen:
            with torch.no_grad():
                teacher = head.logits(batch, batch.original).log_softmax(-1)
            with _checkpointing(skeleton.blocks) if job.recompute else nullcontext():
                mine = student(batch).log_softmax(-1)
                loss = F.kl_div(mine, teacher, reduction="sum", log_target=True) / batch.tokens.numel()
                if weight:
                    wanted = batch.tokens[:, 1:].to(device).flatten()
                    own = F.nll_loss(mine[:, :-1].flatten(0, 1), wanted)
                    loss = (1 - weight) * loss + weight * own
                (loss / len(chosen)).backward()
        ranks.average_gradients(optimizer.parameters)
        nn.utils.clip_grad_norm_(optimizer.parameters, CLIP, foreach=True)
        optimizer.step()

    recorded = None
    if job.record and recordable(job.train, order, skeleton.blocks):
        recorded = Recorded(lambda batch, tokens, x: learn([replace(batch, tokens=tokens, original=x)]), device)
    before = best = compare(head, job.held_out, student)
    kept = None
    for step in range(steps):
        optimizer.schedule(step, steps)
        chosen = [job.train[b] for b in order[step]]
        if recorded is None:
            learn(chosen)
        else:
            recorded(chosen[0], chosen[0].tokens.to(device), chosen[0].place.fetch(chosen[0].original))
        if (step + 1) % interval == 0 or step + 1 == steps:
            now = compare(head, job.held_out, student)
            if now.divergence < best.divergence:
                best, kept = now, {name: layer.harden() for name, layer in layers.items()}
        progress(step + 1, steps)
    return kept, before, best


def _load_student(
    skeleton: Skeleton, blocks: dict[int, dict[str, Quantized]], device: torch.device, recipe: Recipe | None
) -> dict[str, StudentLinear]:
    """The skeleton's own blocks filled in, their quantized layers replaced; the layers by ``<block>.<path>``. Given a
    recipe, which knows their grids, codes train too."""
    layers: dict[str, StudentLinear] = {}
    for index, block in blocks.items():
        loaded = skeleton.load_block(index, device)
        for name, weight in block.items():
            linear: Any = loaded.get_submodule(name)
            layer: StudentLinear
            if recipe is None:
                layer = ScaledLinear(weight.to(device), linear.bias)
            else:
                grid = recipe.choice(f"{skeleton.block_name(index)}.{name}")
                assert grid is not None
                layer = CodedLinear(weight.to(device), linear.weight.detach(), linear.bias, grid.levels)
            loaded.set_submodule(name, layer)
            layers[f"{index}.{name}"] = layer
        skeleton.blocks[index] = loaded
    return layers


@contextmanager
def _checkpointing(blocks: nn.ModuleList) -> Iterator[None]:
    """Every block is run again in the backward pass instead of keeping what it computed."""

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    with replaced_forwards(blocks, [recomputed(block.forward) for block in blocks]):
        yield
