"""A training step as one CUDA graph: steps of small models are bound by the launches of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import SeparateExperts

from ..model.activations import Batch
from ..run import distributed as ranks

WARMUP = 3  # steps taken as they are, in which libraries and the optimizer allocate what they keep
# Weights, above which a step's products take longer than its launches and a second pool of memory is not worth it.
LAUNCH_BOUND = 1 << 26


class CannotRecord(Exception):
    """The model does something on the way that a graph cannot hold, such as waiting for the GPU."""


def recordable(batches: list[Batch], order: list[list[int]], blocks: Iterable[nn.Module]) -> bool:
    """Whether all steps run the same kernels: on a GPU, by one process, one batch each, all of one shape and called
    alike, through small blocks without a choice of experts."""
    first, blocks = batches[0], list(blocks)
    return (
        first.place.device.type == "cuda"
        and ranks.world() == 1
        and all(len(step) == 1 for step in order)
        and all(batch.tokens.shape == first.tokens.shape and batch.calls is first.calls for batch in batches)
        and not any(isinstance(module, SeparateExperts) for block in blocks for module in block.modules())
        and sum(tensor.numel() for block in blocks for tensor in block.parameters()) <= LAUNCH_BOUND
    )


class Recorded:
    """A step that is recorded once and then replayed on other inputs.

    Whatever else changes from step to step (learning rates, temperatures) must be a tensor on the device, changed in
    place; gradients must be None at the step's beginning.

    Args:
        step: of the inputs, tensors on the device whose shapes never change.
        generator: of the step's random numbers, if any.
    """

    def __init__(
        self, step: Callable[..., None], device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self._step, self._device, self._generator = step, device, generator
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._taken = 0

    def __call__(self, *inputs: Tensor) -> None:
        """Take the step.

        Raises:
            CannotRecord: what has changed by then is to be thrown away.
        """
        if self._taken < WARMUP:
            # Away from the default stream, which a recording may not wait for.
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._step(*inputs)
            current.wait_stream(self._stream)
        else:
            if self._graph is None:
                self._inputs = [torch.empty_like(x) for x in inputs]
                self._graph = self._record()
            for held, x in zip(self._inputs, inputs, strict=True):
                held.copy_(x, non_blocking=True)
            self._graph.replay()
        self._taken += 1

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        try:
            with torch.cuda.graph(graph):
                self._step(*self._inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(" ".join(str(error).split())[:200]) from error
        return graph
