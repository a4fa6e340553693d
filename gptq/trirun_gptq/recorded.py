"""A training step as one CUDA graph: steps of small models are bound by the launches of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from trirun_kernels.experts import SeparateExperts

from . import ranks
from .activations import Batch

WARMUP = 3  # steps taken as they are, in which libraries and the optimizer allocate what they keep
# Weights trained per step, above which products take longer than launches and a second pool of memory is not worth it.
LAUNCH_BOUND = 1 << 25


def recordable(batches: list[Batch], order: list[list[int]], blocks: Iterable[nn.Module]) -> bool:
    """Whether all steps run the same kernels: on a GPU, by one process, one batch each, all of one shape and called
    alike, through small blocks without a choice of experts."""
    first = batches[0]
    if first.place.device.type != "cuda" or ranks.world() > 1:
        return False
    if any(len(step) != 1 for step in order):
        return False
    if any(batch.tokens.shape != first.tokens.shape or batch.calls is not first.calls for batch in batches):
        return False
    blocks = list(blocks)
    if any(isinstance(module, SeparateExperts) for block in blocks for module in block.modules()):
        return False
    return sum(tensor.numel() for block in blocks for tensor in block.parameters()) <= LAUNCH_BOUND


class Recorded:
    """A step that is recorded once and then replayed on other inputs.

    Whatever else changes from step to step (learning rates, temperatures) must be a tensor on the device, changed in
    place; gradients must be set to None at the step's beginning.

    Args:
        step: of the inputs, tensors of shapes that never change. generator: of the step's random numbers, if any.
    """

    def __init__(self, step: Callable[..., None], device: torch.device, generator: torch.Generator | None = None):
        self._step, self._device, self._generator = step, device, generator
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._taken = 0

    def __call__(self, *inputs: Tensor) -> None:
        """Take the step."""
        if self._graph is None and self._taken < WARMUP:
            self._taken += 1
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._step(*inputs)
            current.wait_stream(self._stream)
            return
        if self._graph is None:
            self._inputs = [x.clone() for x in inputs]
            self._graph = torch.cuda.CUDAGraph()
            if self._generator is not None:
                self._graph.register_generator_state(self._generator)
            with torch.cuda.graph(self._graph):
                self._step(*self._inputs)
        else:
            for held, x in zip(self._inputs, inputs, strict=True):
                held.copy_(x, non_blocking=True)
        self._graph.replay()
