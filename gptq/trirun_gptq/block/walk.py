"""One decoder block: statistics, solver, refinement, and the activations it hands on."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trirun_kernels import QuantSpec

from ..errors import QuantizationError, ScaleError
from ..layer.gptq import Solution, System, corrected_target
from ..layer.hessian import Hessian
from ..layer.quantized import Quantized
from ..model.activations import Batch, compute, has_bfloat16, input_groups, inputs_of, run_block
from ..model.experts import is_expert
from ..model.loader import Skeleton, linear_layers
from ..recipe import Recipe
from ..run import distributed as ranks
from ..run.profile import Costs
from ..run.progress import BlockReport, ModuleReport, Observer
from .reconstruct import Job, block_error, refine_block


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of one block: quantized weights by path within the block, and the reports."""

    quantized: dict[str, Quantized]
    kept: list[str]
    modules: list[ModuleReport]
    report: BlockReport


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
        observer: Observer,
        costs: Costs,
        record: bool,
    ) -> None:
        self.costs, self.record = costs, record
        self.started = time.perf_counter()
        self.index, self.name = index, skeleton.block_name(index)
        self.train, self.held_out = train, held_out
        self.recipe, self.device, self.observer = recipe, train[0].place.device, observer
        with costs.stage("load"):
            self.original = skeleton.load_block(index, self.device)
            self.block = copy.deepcopy(self.original)
        self.layers = linear_layers(self.block)
        self.grids = {name: recipe.candidates(f"{self.name}.{name}") for name in self.layers}
        self.kept = [name for name, grids in self.grids.items() if not grids]
        self.quantized: dict[str, Quantized] = {}
        self.modules: list[ModuleReport] = []

    def run(self) -> BlockResult:
        """All steps."""
        chosen = {name: layer for name, layer in self.layers.items() if self.grids[name]}
        with torch.no_grad(), compute(self.device):
            stages = input_groups(self.block, self.index, self.train[0], chosen) if chosen else []
        with self.costs.stage("forward"):
            targets = self._original_outputs()
        passes = stages if self.recipe.sequential or not stages else [list(itertools.chain(*stages))]
        for done, group in enumerate(passes):
            self.observer.stage("hessian", done, len(passes))
            with self.costs.stage("hessian"):
                statistics = self._statistics(group)
            self.observer.stage("solve", done, len(passes))
            with self.costs.stage("solve"):
                for stage, hessians in zip(group, statistics, strict=True):
                    self._solve_stage(stage, *hessians)
        with self.costs.stage("refine" if self.recipe.refine_steps else "forward"):
            error, before, engine = self._refine(chosen, *targets)
        with self.costs.stage("forward"):
            self._hand_on(*targets)
        seconds = time.perf_counter() - self.started
        report = BlockReport(self.index, self.name, error, before, False, seconds, engine)
        return BlockResult(self.quantized, self.kept, self.modules, report)

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
                outputs.append([b.place.keep(run_block(self.original, self.index, b, b.original)) for b in batches])
        return outputs[0], outputs[1]

    def _statistics(self, stages: list[list[str]]) -> list[tuple[Hessian, Hessian | None]]:
        """For each stage, the Hessians of the input its layers share: over the training batches, and the held-out ones
        where a correction is to be decided. All from one pass over the batches."""
        wanted = self.recipe.correction > 0 and self.index + len(self.modules) > 0
        # The two streams may send a token to different experts: there is nothing to correct towards.
        compared = [stage[0] for stage in stages if wanted and not self._is_expert(stage[0])]
        pair = []
        for batches, names in ((self.train, [stage[0] for stage in stages]), (self.held_out, compared)):
            hessians = {
                name: Hessian(self.layers[name].in_features, f"{self.name}.{name}", self.device) for name in names
            }
            for batch in batches if names else ():
                with torch.no_grad():
                    seen = self._inputs(self.block, names, batch, batch.quantized)
                    original = self._inputs(self.original, compared, batch, batch.original) if compared else {}
                    for name, x in seen.items():
                        hessians[name].update(x, original.get(name), batch.first)
            for hessian in hessians.values():
                hessian.total()
            pair.append(hessians)
        self._feed_starved([hessian for name, hessian in pair[0].items() if self._is_expert(name)])
        return [(pair[0][stage[0]], pair[1].get(stage[0])) for stage in stages]

    def _is_expert(self, layer: str) -> bool:
        return is_expert(f"{self.name}.{layer}.weight")

    def _feed_starved(self, hessians: list[Hessian]) -> None:
        """Mix the statistics of experts that few tokens chose with those of all experts, and say which they were."""
        starved = [hessian for hessian in hessians if hessian.rows < hessian.k]
        if not starved:
            return
        pools = {hessian.k: Hessian.sum([other for other in hessians if other.k == hessian.k]) for hessian in starved}
        for hessian in starved:
            hessian.mix(pools[hessian.k])
        named = ", ".join(f"{hessian.name.removeprefix(self.name + '.')} ({hessian.rows})" for hessian in starved[:8])
        self.observer.warning(
            f"{self.name}: {len(starved)} of {len(hessians)} expert inputs saw fewer tokens than they have features; "
            f"statistics of all experts are mixed in: {named}" + (", ..." if len(starved) > 8 else "")
        )

    def _inputs(self, block: nn.Module, layers: list[str], batch: Batch, hidden: Tensor) -> dict[str, Tensor]:
        modules = {block.get_submodule(name): name for name in layers}
        with compute(self.device):
            seen = inputs_of(block, self.index, batch, hidden, list(modules))
        # On a GPU the layer's own product reads bfloat16; so do its statistics, at the speed of its matrix units.
        lower = self.device.type == "cuda" and has_bfloat16(self.device)
        return {modules[module]: x.bfloat16() if lower else x for module, x in seen.items()}

    def _solve_stage(self, stage: list[str], hessian: Hessian, held_out: Hessian | None) -> None:
        """Quantize the layers of a stage, stacked along n where they share a grid, and put them into the block."""
        system = System(hessian, self.recipe.damp, self.recipe.act_order)
        if system.factor.damp > self.recipe.damp:
            self.observer.warning(f"{self.name}.{stage[0]}: damping raised to {system.factor.damp:g}")
        for grids in dict.fromkeys(self.grids[name] for name in stage):
            names = [name for name in stage if self.grids[name] == grids]
            started = time.perf_counter()
            weights = {name: self.layers[name].weight for name in names}
            try:
                solution = self._best_solution(torch.cat(list(weights.values())), system, hessian, held_out, grids)
            except ScaleError as error:
                largest = max(weights, key=lambda name: float(weights[name].abs().max()))
                raise QuantizationError(f"{self.name}.{largest}: {error}") from None
            quantized = ranks.from_first(solution.quantized)
            rows = [self.layers[name].out_features for name in names]
            for name, part in zip(names, split_rows(quantized, rows), strict=True):
                self.layers[name].weight = nn.Parameter(part.dequantize(), requires_grad=False)
                self.quantized[name] = part
                facts = (part.n, part.k, part.spec, solution.loss, solution.damp, solution.dead)
                seconds = (time.perf_counter() - started) / len(names)
                self.modules.append(ModuleReport(f"{self.name}.{name}", *facts, seconds, hessian.rows))
                self.observer.module_finished(self.modules[-1])

    def _best_solution(
        self,
        weight: Tensor,
        system: System,
        hessian: Hessian,
        held_out: Hessian | None,
        grids: tuple[tuple[QuantSpec, bool], ...],
    ) -> Solution:
        """With or without correction, and on which of the candidate grids: what has the least error on held-out
        sequences; by the error that H predicts where the two streams are still one. The first grid decides about the
        correction, which is about the streams, for all of them."""
        recipe, source = self.recipe, weight.float()
        settings: dict[str, Any] = {"clip": recipe.clip, "sweeps": recipe.sweeps, "refit": recipe.refit}
        cross = None if held_out is None else held_out.cross
        wanted = None if cross is None else source @ cross

        def error(quantized: Quantized) -> float:
            if held_out is None or wanted is None:
                return system.solution(quantized, source).loss
            return stream_error(quantized, wanted, held_out)

        targets = [system.target(source)]
        if held_out is not None:
            targets.append(system.target(corrected_target(source, hessian, recipe.damp, recipe.correction)))
        best, least, aim = None, float("inf"), targets[0]
        for spec, ternary in grids:
            for target in targets:
                quantized = system.solve(target, spec, ternary=ternary, **settings)
                found = error(quantized)
                if best is None or found < least:
                    best, least, aim = quantized, found, target
            targets = [aim]
        assert best is not None
        return system.solution(best, source)

    def _refine(
        self, chosen: dict[str, nn.Linear], train: list[Tensor], held_out: list[Tensor]
    ) -> tuple[float, float, str]:
        """Held-out error after and before refinement, and the engine whose result was kept ("" for none)."""
        if not self.recipe.refine_steps or not chosen:
            error = block_error(self.block, self.index, self.held_out, held_out)
            return error, error, ""
        job = Job(
            self.block,
            self.index,
            chosen,
            self.quantized,
            {name: layer.weight for name, layer in linear_layers(self.original).items() if name in chosen},
            {name for name, grids in self.grids.items() if grids and grids[0][1]},
            (self.train, train),
            (self.held_out, held_out),
            self.record,
        )
        progress = self.observer.stage
        self.quantized, error, before, engine = refine_block(
            job, self.recipe, lambda done, total: progress("refine", done, total)
        )
        if not engine:
            self.observer.warning(f"{self.name}: refinement did not lower the held-out error {before:.4g}; rolled back")
        return error, before, engine

    def _hand_on(self, train: list[Tensor], held_out: list[Tensor]) -> None:
        """Replace every batch's hidden states by this block's outputs: all of them, or none when it fails."""
        batches, outputs = [*self.train, *self.held_out], []
        for done, batch in enumerate(batches):
            with torch.no_grad(), compute(self.device):
                out = run_block(self.block, self.index, batch, batch.quantized)
            if not bool(torch.isfinite(out).all()):
                raise QuantizationError(f"{self.name}: its output on calibration sample {batch.first} is not finite")
            outputs.append(batch.place.keep(out))
            self.observer.stage("replay", done + 1, len(batches))
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
