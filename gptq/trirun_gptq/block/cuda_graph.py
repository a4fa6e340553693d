"""A training step as one CUDA graph: steps of small models are bound by the launches of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import SeparateExperts

from ..model.activations import Batch, shares
from ..run import distributed as ranks

WARMUP = 3  # steps taken as they are, in which libraries and the optimizer allocate what they keep
# Weights, above which a step's products take longer than its launches and a second pool of memory is not worth it.
LAUNCH_BOUND = 1 << 26
KINDS = 4  # of batches, each with a graph of its own; those of natural length are of too many


class CannotRecord(Exception):
    """The model does something on the way that a graph cannot hold, such as waiting for the GPU."""


def recordable(batches: list[Batch], order: list[list[int]], blocks: Iterable[nn.Module]) -> bool:
    """Whether steps run the same kernels over and over: on a GPU, by one process, one batch each, of few kinds, through
    small blocks that share nothing and choose no experts."""
    blocks = list(blocks)
    return (
        batches[0].place.device.type == "cuda"
        and ranks.world() == 1
        and all(len(step) == 1 for step in order)
        and len(set(map(_kind, batches))) <= KINDS
        and not any(shares(kwargs) for batch in batches for _, kwargs in batch.calls)
        and not any(isinstance(module, SeparateExperts) for block in blocks for module in block.modules())
        and sum(tensor.numel() for block in blocks for tensor in block.parameters()) <= LAUNCH_BOUND
    )


def _kind(batch: Batch) -> Any:
    """Equal for batches that take the same kernels: those of one shape, called alike."""
    return batch.tokens.shape, id(batch.calls)


@dataclass(slots=True)
class _Graph:
    """The step on one kind of batch: how often it was taken, its graph once there is one, and what the graph reads."""

    taken: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Tensor] = field(default_factory=list)


class Recorded:
    """A step that is recorded once for every kind of batch and then replayed on other inputs.

    Whatever else changes from step to step (learning rates, temperatures) must be a tensor on the device, changed in
    place; gradients must be None at the step's beginning.

    Args:
        step: of a batch, which says how its blocks are called, and of the inputs, tensors on the device.
        generator: of the step's random numbers, if any.
    """

    def __init__(
        self, step: Callable[..., None], device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self._step, self._device, self._generator = step, device, generator
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[Any, _Graph] = {}
        # One of them runs at a time, and nothing that it leaves there is read later.
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, *inputs: Tensor) -> None:
        """Take the step.

        Raises:
            CannotRecord: what has changed by then is to be thrown away.
        """
        kind = self._graphs.setdefault(_kind(batch), _Graph())
        if kind.taken < WARMUP:
            # Away from the default stream, which a recording may not wait for.
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._step(batch, *inputs)
            current.wait_stream(self._stream)
        else:
            if kind.graph is None:
                kind.inputs = [torch.empty_like(x) for x in inputs]
                kind.graph = self._record(batch, kind.inputs)
            for held, x in zip(kind.inputs, inputs, strict=True):
                held.copy_(x, non_blocking=True)
            kind.graph.replay()
        kind.taken += 1

    def _record(self, batch: Batch, inputs: list[Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._step(batch, *inputs)
            # A capture begins with the generator's offset set there; so does every replay, which comes after.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(" ".join(str(error).split())[:200]) from error
        return graph
