"""Block refinement: codes and scales of a whole block trained against the output of the original block.

GPTQ sees one layer at a time. Here all layers of a block move together to lower the error of what the block hands on
(Li et al. 2021, "BRECQ"; Cheng et al. 2023, "SignRound"; Chen et al. 2024, "EfficientQAT", Block-AP), with one or both
of the methods of ``trainable.py``. Training starts at the GPTQ solution; the best state on held-out sequences is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..layer.quantized import Quantized
from ..model.activations import Batch, compute, run_block
from ..recipe import Recipe
from ..run import distributed as ranks
from .cuda_graph import Recorded, recordable
from .optim import Adam, step_batches
from .trainable import METHODS, Trainable

EVALUATIONS = 8  # times per run that the held-out error is measured


@dataclass(frozen=True, slots=True)
class Job:
    """One block to refine.

    Attributes:
        block: whose linear layers hold the GPTQ solutions. index: its position in the model.
        layers: the quantized linear layers by name. start: their solutions. originals: float32 weights.
        levels: codes in use by name: 4, or 3 where the grid is ternary.
        train, held_out: batches, and the original block's outputs on ``batch.original`` as the batches keep them.
        record: steps as CUDA graphs where they can be.
    """

    block: nn.Module
    index: int
    layers: dict[str, nn.Linear]
    start: dict[str, Quantized]
    originals: dict[str, Tensor]
    levels: dict[str, int]
    train: tuple[list[Batch], list[Tensor]]
    held_out: tuple[list[Batch], list[Tensor]]
    record: bool

    def install(self, state: dict[str, Quantized]) -> None:
        """Put a state into the layers, as plain weights."""
        for name, layer in self.layers.items():
            layer.weight = nn.Parameter(state[name].dequantize(), requires_grad=False)

    def error(self) -> float:
        """The held-out error of the block as it is."""
        return block_error(self.block, self.index, *self.held_out)


def block_error(block: nn.Module, index: int, batches: list[Batch], targets: list[Tensor]) -> float:
    """Relative squared error of the block's output on the quantized stream against the original outputs.

    Args:
        index: the block's position in the model.
        targets: of every batch, what the original block made of ``batch.original``, [b, t, h] as the batch keeps it.

    Returns:
        ``Σ‖out − target‖² / Σ‖target‖²`` over the tokens of all processes; 0 where all targets are zero.
    """
    wrong = whole = 0.0
    for batch, target in zip(batches, targets, strict=True):
        with torch.no_grad(), compute(batch.place.device):
            out = run_block(block, index, batch).float()
            wanted = batch.place.fetch(target)
            wrong += float((out - wanted).square().sum())
            whole += float(wanted.square().sum())
    wrong, whole = ranks.total_of(wrong, whole)
    return wrong / whole if whole else 0.0


def refine_block(
    job: Job, recipe: Recipe, progress: Callable[[int, int], None]
) -> tuple[dict[str, Quantized], float, float, str]:
    """Train a block's codes and scales by every method of the recipe, from the same start on the same batches; the
    block's weights are left at the state returned.

    Args:
        progress: called with (steps done, steps).

    Returns:
        The best state, its held-out error, the error before, and the method it came from. Where nothing was better the
        state is ``job.start`` and the method "".
    """
    before = job.error()
    best, least, winner = job.start, before, ""
    steps, methods = recipe.refine_steps, recipe.engines
    for done, method in enumerate(methods):
        job.install(job.start)

        def advance(step: int, done: int = done) -> None:
            progress(done * steps + step, len(methods) * steps)

        state = _train(job, method, recipe, advance)
        if state is None:
            continue
        # What is stored has fp16 scales: its own error decides, not that of the float32 state it came from.
        job.install(state)
        error = job.error()
        if error < least:
            best, least, winner = state, error, method
    job.install(best)
    return best, least, before, winner


def _train(job: Job, method: str, recipe: Recipe, progress: Callable[[int], None]) -> dict[str, Quantized] | None:
    """The best state that one method reached on the held-out sequences; None where none beat the start."""
    device = job.train[0][0].place.device
    noise = torch.Generator(device).manual_seed(recipe.seed * 1013 + job.index)
    adapters = {
        name: METHODS[method](job.start[name], job.originals[name], job.levels[name], noise) for name in job.layers
    }
    for name, layer in job.layers.items():
        parametrize.register_parametrization(layer, "weight", adapters[name], unsafe=True)
    try:
        return _descend(job, adapters, recipe, progress)
    finally:
        for layer in job.layers.values():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


def _descend(
    job: Job, adapters: Mapping[str, Trainable], recipe: Recipe, progress: Callable[[int], None]
) -> dict[str, Quantized] | None:
    batches, steps = job.train[0], recipe.refine_steps
    device = batches[0].place.device
    rate = recipe.refine_lr * next(iter(adapters.values())).rate
    optimizer = Adam(
        [
            {"params": [p for a in adapters.values() for p in a.code_parameters()], "lr": rate},
            {"params": [p for a in adapters.values() for p in a.scale_parameters()], "lr": recipe.refine_scale_lr},
        ],
        device,
    )
    order = step_batches(batches, steps, recipe.seed * 1009 + job.index)

    def learn(chosen: list[Batch], wanted: list[Tensor]) -> None:
        optimizer.zero_grad()
        for batch, target in zip(chosen, wanted, strict=True):
            with compute(device):
                out = run_block(job.block, job.index, batch)
            loss = (out.float() - batch.place.fetch(target)).square().mean() / len(chosen)
            loss.backward()
        ranks.average_gradients(optimizer.parameters)
        optimizer.step()

    recorded = None
    if job.record and recordable(batches, order, [job.block]):
        noise = next(iter(adapters.values())).noise
        recorded = Recorded(lambda batch, x, y: learn([dataclasses.replace(batch, quantized=x)], [y]), device, noise)
    best, least = None, _hard_error(job, adapters)
    interval = max(1, steps // EVALUATIONS)
    for step in range(steps):
        optimizer.schedule(step, steps)
        for adapter in adapters.values():
            adapter.schedule(step / steps)
        batches, targets = job.train
        chosen, wanted = [batches[b] for b in order[step]], [targets[b] for b in order[step]]
        if recorded is None:
            learn(chosen, wanted)
        else:
            place = chosen[0].place
            recorded(chosen[0], place.fetch(chosen[0].quantized), place.fetch(wanted[0]))
        if (step + 1) % interval == 0 or step + 1 == steps:
            error = _hard_error(job, adapters)
            if error < least:
                best, least = {name: adapter.harden() for name, adapter in adapters.items()}, error
        progress(step + 1)
    return best


def _hard_error(job: Job, adapters: Mapping[str, Trainable]) -> float:
    """The held-out error with hard codes; the adapters are left in training mode."""
    for adapter in adapters.values():
        adapter.eval()
    error = job.error()
    for adapter in adapters.values():
        adapter.train()
    return error
