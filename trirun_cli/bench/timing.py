"""How a call is timed: over weights that no cache holds, contestants interleaved, median and spread reported.

On CUDA every contestant's calls, one per weight copy, are captured in one graph, so that neither the launch from
Python nor the L2 flatters it. The copies are together several times the last-level cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .probe import reader

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: median, the distance between the quartiles, and the fastest round."""

    median: float
    spread: float
    best: float
    rounds: int


def interleaved(contestants: Mapping[str, Sequence[Call]], device: torch.device, seconds: float) -> dict[str, Timing]:
    """Time every contestant in turn, again and again, for about ``seconds`` each and at least five rounds.

    Args:
        contestants: name to one call per weight copy. All calls of a contestant run in one round.
    """
    if device.type == "cuda":
        return _interleaved_graphs(contestants, seconds)
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for calls in contestants.values():
        calls[0]()
    end = time.perf_counter() + seconds * len(contestants)
    while min(map(len, rounds.values())) < 5 or time.perf_counter() < end:
        for name, calls in contestants.items():
            start = time.perf_counter()
            for call in calls:
                call()
            rounds[name].append((time.perf_counter() - start) / len(calls))
    return {name: _summary(times) for name, times in rounds.items()}


def _interleaved_graphs(contestants: Mapping[str, Sequence[Call]], seconds: float) -> dict[str, Timing]:
    graphs = {name: captured(calls) for name, calls in contestants.items()}
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for graph in graphs.values():
        graph.replay()
    end = time.perf_counter() + seconds * len(contestants)
    while min(map(len, rounds.values())) < 5 or time.perf_counter() < end:
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            rounds[name].append(start.elapsed_time(stop) * 1e-3 / len(contestants[name]))
    return {name: _summary(times) for name, times in rounds.items()}


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls, one after the other, as one CUDA graph, which does not keep alive what they read."""
    # Outside of the capture first: libraries choose algorithms, compile and allocate on their first call.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # operands may still be on their way
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def _summary(times: list[float]) -> Timing:
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times), high - low, min(times), len(times))


def copies(bytes_each: int, device: torch.device, most: int = 4096) -> int:
    """How many weight copies of ``bytes_each`` leave nothing of the first in the cache when the last has been read; of
    very small ones ``most``, see :func:`from_memory`."""
    return max(2, min(most, -(-4 * cache_bytes(device) // bytes_each)))


def from_memory(bytes_read: int, device: torch.device) -> bool:
    """Whether so many bytes, read in turn, come from memory each time, and not from the last-level cache."""
    return bytes_read >= 2 * cache_bytes(device)


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    found = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found.append(int(text.rstrip("KMG")) * scale if text[-1:] != "G" else 1 << 30)
    # Of a cache of hundreds of MiB shared by a whole server, a few cores see only a part.
    return min(max(found), 128 << 20)


def read_bandwidth(device: torch.device, seconds: float = 0.3) -> float:
    """Bytes per second that this device reads from memory: the fastest round of a plain reader."""
    data = torch.ones(1 << 28 if device.type == "cuda" else 1 << 27, dtype=torch.float32, device=device)
    return data.nbytes / interleaved({"read": [reader(data)]}, device, seconds)["read"].best


def matrix_peak(device: torch.device, seconds: float = 0.3) -> float:
    """Operations per second of torch's own large matrix product (fp16 on CUDA, float32 on a CPU), in its fastest round:
    a GPU at its power limit soon runs slower, and how much slower depends on what ran before."""
    side, dtype = (8192, torch.float16) if device.type == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timing = interleaved({"matmul": [lambda: a @ b.t()]}, device, seconds)["matmul"]
    return 2 * side**3 / timing.best
