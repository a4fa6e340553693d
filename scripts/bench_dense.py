"""What padding and TF32 buy on this GPU: the dense products of the runtime, each beside its slow form.

    python scripts/bench_dense.py [--seconds 0.5] [--json]

Contestants take turns in one run of CUDA graphs; weights rotate past the L2 cache; medians, microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trirun_cli.backends.transformers.dense import PaddedLinear, matmul_precision
from trirun_cli.bench.timing import Call, copies, interleaved

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


def product(linear: nn.Linear, x: torch.Tensor, tf32: bool) -> torch.Tensor:
    """One product, with TF32 allowed or not while it is captured."""
    with matmul_precision(tf32):
        return linear(x)


def microseconds(calls: dict[str, list[Call]], device: torch.device, seconds: float) -> dict[str, float]:
    """Median per call of each contestant."""
    return {name: timing.median * 1e6 for name, timing in interleaved(calls, device, seconds).items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(4, "no CUDA device\n")
    results, device = [], torch.device("cuda")
    for name, n, k, m, dtype in PADDED:
        plain = [nn.Linear(k, n, bias=False, device="cuda", dtype=dtype) for _ in range(copies(2 * n * k, device))]
        padded = [PaddedLinear(linear, 64) for linear in plain]
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        if not torch.allclose(plain[0](x).float(), padded[0](x).float(), rtol=2e-2, atol=2e-2):
            raise AssertionError(f"{name}: padding changed the result")
        calls = {
            "as it is": [partial(linear, x) for linear in plain],
            "padded": [partial(linear, x) for linear in padded],
        }
        results.append((f"{name}, {m} rows, {str(dtype)[6:]}", microseconds(calls, device, options.seconds)))
    for name, n, k, m in TF32:
        linears = [nn.Linear(k, n, bias=False, device="cuda") for _ in range(copies(4 * n * k, device))]
        x = torch.randn(m, k, device="cuda")
        calls = {
            kind: [partial(product, linear, x, allowed) for linear in linears]
            for kind, allowed in (("as it is", False), ("TF32", True))
        }
        results.append((f"{name}, {m} rows, float32", microseconds(calls, device, options.seconds)))
    if options.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "us": dict(results)}, indent=2))
        return
    for name, times in results:
        slow, fast = times.values()
        print(f"{name}: {slow:.1f} us, {list(times)[1]} {fast:.1f} us, {slow / fast:.2f} times as fast")


if __name__ == "__main__":
    main()
