"""One decoder block from float weights to codes: its steps in order. Begin with :meth:`BlockRun.run`."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import QuantizationError, ScaleError
from ..layer.coordinate_descent import Target
from ..layer.gptq import Solution, System, corrected_target
from ..layer.hessian import Hessian
from ..layer.quantized import Quantized
from ..model.activations import Batch, compute, run_block
from ..model.experts import expert_of
from ..model.inputs import input_groups
from ..model.loader import Skeleton, kept_modules, linear_layers
from ..recipe import Grid, Recipe
from ..run import distributed as ranks
from ..run.profile import Costs
from ..run.progress import ProgressCallback, Stage, Warned
from ..run.report import BlockReport, ModuleReport
from .reconstruct import Job, block_error, refine_block
from .statistics import Statistics


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of one block: quantized weights by path within the block, and the reports."""

    quantized: dict[str, Quantized]
    kept: list[str]
    modules: list[ModuleReport]
    report: BlockReport


@dataclass(frozen=True, slots=True)
class _Tried:
    """Layers of a block on each of their candidate grids.

    Attributes:
        names: of the layers, stacked along n. errors, solutions: grid by grid.
        rows: tokens that the layers' inputs saw. seconds: that it took.
    """

    names: list[str]
    errors: list[float]
    solutions: list[Solution]
    rows: int
    seconds: float

    def best(self) -> Solution:
        """Of least error; the first of equals."""
        return self.solutions[self.errors.index(min(self.errors))]


class BlockRun:
    """Quantizes one block; its methods are the steps, in order.

    Two streams of activations run through the model: the original model's, which says what the block should put out,
    and the quantized model's, which is what its layers will really read (``Batch.original``, ``Batch.quantized``).
    """

    def __init__(
        self,
        skeleton: Skeleton,
        index: int,
        train: list[Batch],
        held_out: list[Batch],
        recipe: Recipe,
        progress: ProgressCallback,
        costs: Costs,
        record: bool,
    ) -> None:
        self.costs, self.record = costs, record
        self.started = time.perf_counter()
        self.index, self.name = index, skeleton.block_name(index)
        self.train, self.held_out = train, held_out
        self.recipe, self.device, self.progress = recipe, train[0].place.device, progress
        with costs.stage("load"):
            self.original = skeleton.load_block(index, self.device)
            self.block = copy.deepcopy(self.original)
        self.statistics = Statistics(self.original, self.block, index, self.name, train, held_out, progress)
        self.layers = linear_layers(self.block)
        self.grids = {name: recipe.candidates(f"{self.name}.{name}") for name in self.layers}
        self.kept = [name for name, grids in self.grids.items() if not grids] + list(kept_modules(self.block))
        self.quantized: dict[str, Quantized] = {}
        self.modules: list[ModuleReport] = []

    def run(self) -> BlockResult:
        """All steps."""
        chosen = {name: layer for name, layer in self.layers.items() if self.grids[name]}
        with torch.no_grad(), compute(self.device):
            stages = input_groups(self.block, self.index, self.train[0], chosen) if chosen else []
        chosen = self._called(chosen, stages)
        with self.costs.stage("forward"):
            targets = self._original_outputs()
        passes = stages if self.recipe.sequential or not stages else [list(itertools.chain(*stages))]
        for done, group in enumerate(passes):
            self.progress(Stage("hessian", done, len(passes)))
            with self.costs.stage("hessian"):
                # Before the first quantized layer of the model both streams are one.
                diverged = self.index + len(self.modules) > 0
                statistics = self.statistics.collect(group, corrected=self.recipe.correction > 0 and diverged)
            self.progress(Stage("solve", done, len(passes)))
            with self.costs.stage("solve"):
                self._solve(group, statistics)
        with self.costs.stage("refine" if self.recipe.refine_steps else "forward"):
            error, before, method = self._refine(chosen, *targets)
        with self.costs.stage("forward"):
            self._hand_on(*targets)
        seconds = time.perf_counter() - self.started
        report = BlockReport(self.index, self.name, error, before, False, seconds, method)
        return BlockResult(self.quantized, self.kept, self.modules, report)

    def _called(self, chosen: dict[str, nn.Linear], stages: list[list[list[str]]]) -> dict[str, nn.Linear]:
        """The layers whose inputs are known; the others are kept, and named."""
        seen = {name for groups in stages for group in groups for name in group}
        if left := [name for name in chosen if name not in seen]:
            self.kept += left
            message = f"{self.name}: {', '.join(left)} kept in 16 bits: not called once, or read by others"
            self.progress(Warned(message))
        return {name: layer for name, layer in chosen.items() if name in seen}

    def restore(self, quantized: dict[str, Quantized]) -> None:
        """Take a finished block as it is and only carry the activations through it."""
        for name, weight in quantized.items():
            self.layers[name].weight = nn.Parameter(weight.dequantize().to(self.device), requires_grad=False)
        with self.costs.stage("forward"):
            self._hand_on(*self._original_outputs())

    def _original_outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        outputs = []
        with torch.no_grad(), compute(self.device):
            for batches in (self.train, self.held_out):
                outputs.append([b.place.keep(run_block(self.original, self.index, b, original=True)) for b in batches])
        return outputs[0], outputs[1]

    def _solve(self, stages: list[list[str]], statistics: list[tuple[Hessian, Hessian | None]]) -> None:
        """Quantize the layers of some stages and put them into the block, each on the grid of least error.

        A GPU multiplies all experts of a layer in one launch, so they share a grid: all gates and ups one, all downs
        one, of the least sum of their errors.
        """
        mixtures: dict[tuple[str, bool, tuple[Grid, ...]], list[_Tried]] = {}
        for stage, (hessian, held_out) in zip(stages, statistics, strict=True):
            for tried in self._try_stage(stage, hessian, held_out):
                first = tried.names[0]
                if (expert := expert_of(f"{self.name}.{first}.weight")) is None:
                    self._put(tried, tried.best())
                else:
                    key = expert.path, expert.layer == "down", self.grids[first]
                    mixtures.setdefault(key, []).append(tried)
        for members in mixtures.values():
            sums = [sum(errors) for errors in zip(*(tried.errors for tried in members), strict=True)]
            for tried in members:
                self._put(tried, tried.solutions[sums.index(min(sums))])

    def _try_stage(self, stage: list[str], hessian: Hessian, held_out: Hessian | None) -> Iterator[_Tried]:
        """The layers of a stage, stacked along n where they share candidates, on every candidate grid."""
        system = System(hessian, self.recipe.damp, self.recipe.act_order)
        if system.factor.damp > self.recipe.damp:
            self.progress(Warned(f"{self.name}.{stage[0]}: damping raised to {system.factor.damp:g}"))
        for grids in dict.fromkeys(self.grids[name] for name in stage):
            names = [name for name in stage if self.grids[name] == grids]
            started = time.perf_counter()
            weights = {name: self.layers[name].weight for name in names}
            try:
                found = self._solutions(torch.cat(list(weights.values())), system, hessian, held_out, grids)
            except ScaleError as error:
                largest = max(weights, key=lambda name: float(weights[name].abs().max()))
                raise QuantizationError(f"{self.name}.{largest}: {error}") from None
            yield _Tried(names, *found, hessian.rows, time.perf_counter() - started)

    def _put(self, tried: _Tried, solution: Solution) -> None:
        """Replace the weights of layers by their quantized ones."""
        names, quantized = tried.names, ranks.from_first(solution.quantized)
        rows = [self.layers[name].out_features for name in names]
        for name, part in zip(names, split_rows(quantized, rows), strict=True):
            self.layers[name].weight = nn.Parameter(part.dequantize(), requires_grad=False)
            self.quantized[name] = part
            facts = (part.n, part.k, part.spec, solution.loss, solution.damp, solution.dead)
            self.modules.append(ModuleReport(f"{self.name}.{name}", *facts, tried.seconds / len(names), tried.rows))
            self.progress(self.modules[-1])

    def _solutions(
        self,
        weight: Tensor,
        system: System,
        hessian: Hessian,
        held_out: Hessian | None,
        grids: tuple[Grid, ...],
    ) -> tuple[list[float], list[Solution]]:
        """For each candidate grid, the error and what has it, with or without correction: the error on held-out
        sequences, or the one that H predicts where the two streams are still one. The first grid decides about the
        correction, which is about the streams, for all of them."""
        recipe, source = self.recipe, weight.float()
        settings: dict[str, Any] = {"clip": recipe.clip, "sweeps": recipe.sweeps, "refit": recipe.refit}
        cross = None if held_out is None else held_out.cross
        wanted = None if cross is None else source @ cross

        def solve(target: Target, grid: Grid) -> tuple[float, Solution]:
            quantized = system.solve(target, grid.spec, ternary=grid.ternary, **settings)
            solution = system.solution(quantized, source)
            if held_out is None or wanted is None:
                return solution.loss, solution
            return stream_error(quantized, wanted, held_out), solution

        targets = [system.target(source)]
        if held_out is not None:
            targets.append(system.target(corrected_target(source, hessian, recipe.damp, recipe.correction)))
        errors, solutions = [], []
        for grid in grids:
            tries = [solve(target, grid) for target in targets]
            best = min(range(len(tries)), key=lambda i: tries[i][0])
            errors.append(tries[best][0])
            solutions.append(tries[best][1])
            targets = [targets[best]]
        return errors, solutions

    def _refine(
        self, chosen: dict[str, nn.Linear], train: list[Tensor], held_out: list[Tensor]
    ) -> tuple[float, float, str]:
        """Held-out error after and before refinement, and the method whose result was kept ("" for none)."""
        if not self.recipe.refine_steps or not chosen:
            error = block_error(self.block, self.index, self.held_out, held_out)
            return error, error, ""
        job = Job(
            self.block,
            self.index,
            chosen,
            self.quantized,
            {name: layer.weight for name, layer in linear_layers(self.original).items() if name in chosen},
            {name: self.grids[name][0].levels for name in chosen},
            (self.train, train),
            (self.held_out, held_out),
            self.record,
        )
        self.quantized, error, before, method = refine_block(
            job, self.recipe, lambda done, total: self.progress(Stage("refine", done, total))
        )
        if not method:
            message = f"{self.name}: refinement did not lower the held-out error {before:.4g}; rolled back"
            self.progress(Warned(message))
        return error, before, method

    def _hand_on(self, train: list[Tensor], held_out: list[Tensor]) -> None:
        """Replace every batch's hidden states by this block's outputs: all of them, or none when it fails."""
        batches, outputs = [*self.train, *self.held_out], []
        for done, batch in enumerate(batches):
            with torch.no_grad(), compute(self.device):
                out = run_block(self.block, self.index, batch)
            if not bool(torch.isfinite(out).all()):
                raise QuantizationError(f"{self.name}: its output on calibration sample {batch.first} is not finite")
            outputs.append(batch.place.keep(out))
            self.progress(Stage("replay", done + 1, len(batches)))
        for batch, target, out in zip(batches, [*train, *held_out], outputs, strict=True):
            batch.original, batch.quantized = target, out


def split_rows(stacked: Quantized, rows: list[int]) -> list[Quantized]:
    """A weight stacked along n, taken apart again."""
    codes, scales = stacked.codes.split(rows), stacked.scales.split(rows)
    zeros = [None] * len(rows) if stacked.zeros is None else stacked.zeros.split(rows)
    return [Quantized(c, s, z, stacked.spec) for c, s, z in zip(codes, scales, zeros, strict=True)]


def stream_error(quantized: Quantized, wanted: Tensor, hessian: Hessian) -> float:
    """``‖x₀Wᵀ − xŴᵀ‖²`` per token up to a constant, from the statistics of both streams; ``wanted`` is W·G, [n, k]."""
    candidate = quantized.dequantize()
    return float(((candidate @ hessian.matrix - 2 * wanted) * candidate).sum())
