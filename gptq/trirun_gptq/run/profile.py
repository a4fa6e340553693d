"""What a run costs, stage by stage."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StageCost:
    """One kind of work over the whole run.

    Attributes:
        seconds: of wall time. device_bytes: the most that was allocated on the GPU during it; 0 on a CPU.
        reserved_bytes: the most that PyTorch's allocator held there, the memory included that it keeps for later and
            gives back when there is no other; a context of some 500 MiB comes on top in ``nvidia-smi``.
        host_bytes: peak resident memory of the process by its end.
    """

    seconds: float
    device_bytes: int
    host_bytes: int
    reserved_bytes: int = 0


class Costs:
    """Adds up stages; those of one name become one entry, in the order they first ran."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stages: dict[str, StageCost] = {}

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(stage.seconds for stage in self.stages.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time and peak memory of what runs inside. A GPU is waited for at both ends, or work would count elsewhere."""
        gpu = self._device.type == "cuda"
        if gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        try:
            yield
        finally:
            if gpu:
                torch.cuda.synchronize(self._device)
            before = self.stages.get(name, StageCost(0.0, 0, 0))
            self.stages[name] = StageCost(
                before.seconds + time.perf_counter() - started,
                max(before.device_bytes, torch.cuda.max_memory_allocated(self._device) if gpu else 0),
                peak_host_bytes(),
                max(before.reserved_bytes, torch.cuda.max_memory_reserved(self._device) if gpu else 0),
            )


def peak_host_bytes() -> int:
    """The most memory this process had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
