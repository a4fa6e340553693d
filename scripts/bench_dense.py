"""What padding and TF32 buy on this GPU: the dense products of the runtime, each beside its slow form.

    python scripts/bench_dense.py [--seconds 0.5] [--json]

Contestants take turns in one run of CUDA graphs; weights rotate past the L2 cache; medians, microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trirun_cli.runtime.dense import PaddedLinear, matmul_precision

# (name, n, k, rows of x, dtype): GPT-2's head, a head with an odd vocabulary, an odd MLP.
PADDED = (
    ("head 50257 × 768", 50257, 768, 1, torch.float16),
    ("head 50257 × 768", 50257, 768, 512, torch.float16),
    ("head 32003 × 4096", 32003, 4096, 1, torch.float16),
    ("head 32003 × 4096", 32003, 4096, 512, torch.bfloat16),
    ("linear 11007 × 4096", 11007, 4096, 512, torch.bfloat16),
    ("linear 4096 × 11007", 4096, 11007, 512, torch.bfloat16),
)
TF32 = (("linear 4096 × 4096", 4096, 4096, 1), ("linear 4096 × 4096", 4096, 4096, 512))
L2_BYTES = 200 << 20


def graph_of(product: Callable[[int], object], copies: int) -> torch.cuda.CUDAGraph:
    """All copies in turn, captured after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(copies):
            product(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(copies):
            product(index)
    return graph


def interleaved(contestants: dict[str, torch.cuda.CUDAGraph], copies: int, seconds: float) -> dict[str, float]:
    """Median microseconds per product of each."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(next(iter(times.values()))) < 5:
        for name, graph in contestants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / copies)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(4, "no CUDA device\n")
    results = []
    for name, n, k, m, dtype in PADDED:
        copies = max(2, L2_BYTES // (2 * n * k) + 1)
        plain = [nn.Linear(k, n, bias=False, device="cuda", dtype=dtype) for _ in range(copies)]
        padded = [PaddedLinear(linear, 64) for linear in plain]
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        if not torch.allclose(plain[0](x).float(), padded[0](x).float(), rtol=2e-2, atol=2e-2):
            raise AssertionError(f"{name}: padding changed the result")
        graphs = {
            "as it is": graph_of(lambda i, plain=plain, x=x: plain[i](x), copies),
            "padded": graph_of(lambda i, padded=padded, x=x: padded[i](x), copies),
        }
        results.append((f"{name}, {m} rows, {str(dtype)[6:]}", interleaved(graphs, copies, options.seconds)))
    for name, n, k, m in TF32:
        copies = max(2, L2_BYTES // (4 * n * k) + 1)
        linears = [nn.Linear(k, n, bias=False, device="cuda") for _ in range(copies)]
        x, graphs = torch.randn(m, k, device="cuda"), {}
        for kind, allowed in (("as it is", False), ("TF32", True)):
            with matmul_precision(allowed):
                graphs[kind] = graph_of(lambda i, linears=linears, x=x: linears[i](x), copies)
        results.append((f"{name}, {m} rows, float32", interleaved(graphs, copies, options.seconds)))
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "us": dict(results)}, indent=2))
        return
    for name, times in results:
        slow, fast = times.values()
        print(f"{name}: {slow:.1f} us, {list(times)[1]} {fast:.1f} us, {slow / fast:.2f} times as fast")


if __name__ == "__main__":
    main()
