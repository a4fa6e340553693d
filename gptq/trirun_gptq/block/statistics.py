"""What the layers of one block read: their Hessians over the calibration batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layer.hessian import Hessian
from ..model.activations import Batch, compute, has_bfloat16
from ..model.experts import is_expert
from ..model.inputs import inputs_of
from ..run.progress import ProgressCallback, Warned


class Statistics:
    """Collects Hessians of a block that is being quantized.

    Args:
        original, block: the block as it was, and as far as it is quantized; both change while it is.
        index, name: its position and its path in the model.
        train, held_out: batches with hidden states before the block.
        progress: is told of experts that saw too little text.
    """

    def __init__(
        self,
        original: nn.Module,
        block: nn.Module,
        index: int,
        name: str,
        train: list[Batch],
        held_out: list[Batch],
        progress: ProgressCallback,
    ) -> None:
        self._original, self._block, self._index, self._name = original, block, index, name
        self._train, self._held_out, self._progress = train, held_out, progress
        self._device = train[0].place.device

    def collect(self, stages: list[list[str]], *, corrected: bool) -> list[tuple[Hessian, Hessian | None]]:
        """For each stage, the Hessians of the input that its layers share: over the training batches, and over the
        held-out ones. All from one pass over the batches.

        Args:
            stages: layers by their path in the block; those of one stage read the same tensor.
            corrected: with the cross statistics G of the original model's inputs, which a correction of the target
                needs; without, there are no statistics of the held-out batches.

        Raises:
            QuantizationError: an input is not finite; the layer and the sample are named.
        """
        # The two streams may send a token to different experts: there is nothing to correct towards.
        compared = [stage[0] for stage in stages if corrected and not self._is_expert(stage[0])]
        pair = []
        for batches, names in ((self._train, [stage[0] for stage in stages]), (self._held_out, compared)):
            hessians = {name: self._hessian(name) for name in names}
            for batch in batches if names else ():
                with torch.no_grad():
                    seen = self._inputs(self._block, names, batch)
                    original = self._inputs(self._original, compared, batch, original=True) if compared else {}
                    for name, x in seen.items():
                        hessians[name].update(x, original.get(name), batch.first)
            for hessian in hessians.values():
                hessian.total()
            pair.append(hessians)
        self._feed_starved([hessian for name, hessian in pair[0].items() if self._is_expert(name)])
        return [(pair[0][stage[0]], pair[1].get(stage[0])) for stage in stages]

    def _hessian(self, layer: str) -> Hessian:
        weight = self._block.get_submodule(layer).weight
        assert isinstance(weight, Tensor)
        return Hessian(weight.shape[1], f"{self._name}.{layer}", self._device)

    def _is_expert(self, layer: str) -> bool:
        return is_expert(f"{self._name}.{layer}.weight")

    def _feed_starved(self, hessians: list[Hessian]) -> None:
        """Mix the statistics of experts that few tokens chose with those of all experts, and say which they were."""
        starved = [hessian for hessian in hessians if hessian.rows < hessian.k]
        if not starved:
            return
        pools = {hessian.k: Hessian.sum([other for other in hessians if other.k == hessian.k]) for hessian in starved}
        for hessian in starved:
            hessian.mix(pools[hessian.k])
        named = ", ".join(f"{hessian.name.removeprefix(self._name + '.')} ({hessian.rows})" for hessian in starved[:8])
        message = (
            f"{self._name}: {len(starved)} of {len(hessians)} expert inputs saw fewer tokens than they have features; "
            f"statistics of all experts are mixed in: {named}"
        )
        self._progress(Warned(message + (", ..." if len(starved) > 8 else "")))

    def _inputs(
        self, block: nn.Module, layers: list[str], batch: Batch, *, original: bool = False
    ) -> dict[str, Tensor]:
        modules = {block.get_submodule(name): name for name in layers}
        with compute(self._device):
            seen = inputs_of(block, self._index, batch, list(modules), original=original)
        # On a GPU the layer's own product reads bfloat16; so do its statistics, at the speed of its matrix units.
        lower = self._device.type == "cuda" and has_bfloat16(self._device)
        return {modules[module]: x.bfloat16() if lower else x for module, x in seen.items()}
