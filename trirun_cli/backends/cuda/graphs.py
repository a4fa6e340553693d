"""Steps of a GPU runner as captured CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs

from .sampler import RING, CudaSampler


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of so many rows: the model, where its logits are, and by turn the sampler, which waits for the
    masks of grammars."""

    model: torch.cuda.CUDAGraph
    logits: Tensor
    samplers: Sequence[torch.cuda.CUDAGraph]


def captured(decoder: CudaDecoder, sampler: CudaSampler, inputs: Inputs, sizes: Sequence[int]) -> dict[int, StepGraph]:
    """A graph per number of rows, of which each adds one token to its slot.

    Args:
        inputs: what the graphs read, in memory that never moves. sizes: numbers of rows, ascending.
    """
    graphs: dict[int, StepGraph] = {}
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    # Weights and inputs are still on their way there on the current stream, which orders nothing on another: on a
    # busy GPU the first step would read slots and tables that are not written yet.
    stream.wait_stream(torch.cuda.current_stream())
    # The largest first: the others then live in the memory that it needs.
    for size in reversed(sizes):
        rows = inputs.rows(size)
        with torch.cuda.stream(stream):
            # Libraries choose algorithms and allocate on their first call. Rows without a slot change nothing.
            sampler.sample(decoder.forward(rows), rows.slots, rows.positions, rows.tokens)
        stream.synchronize()
        model, samplers = torch.cuda.CUDAGraph(), [torch.cuda.CUDAGraph() for _ in range(RING)]
        with _capture(model, pool, stream):
            logits = decoder.forward(rows)
        for turn, graph in enumerate(samplers):
            with _capture(graph, pool, stream):
                sampler.sample(logits, rows.slots, rows.positions, rows.tokens, turn)
        graphs[size] = StepGraph(model, logits, samplers)
    torch.cuda.synchronize()
    return graphs


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Other threads may run another model meanwhile, and allocate: no part of this. Nor is garbage collected, which on
    this thread may free another model's graphs and events: that ends a capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()
