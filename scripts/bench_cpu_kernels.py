"""Times the CPU's INT2 GEMM on the linears of a Llama model, beside a plain read of the same bytes.

    python scripts/bench_cpu_kernels.py [--layers 24] [--threads 2] [--m 1,2,4,8,16,32,128] [--act-bits 8,16]
                                        [--group-size -1,128] [--isa amx,avx512vnni] [--seconds 3] [--json]

Every configuration is first checked against float64 (bit for bit against the portable kernel), then timed. Weights are
random ternary codes, different for every layer, so that they come from DRAM and not from a cache; the read and the
product alternate in one run, and the best of each is reported with the median of their ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import time
from ctypes import byref
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from trirun_kernels import native
from trirun_kernels.gemm import cpu
from trirun_kernels.gemm.reference import int8_round_trip
from trirun_kernels.weights.packing import PackedWeight, dequantize, pack
from trirun_kernels.weights.spec import QuantSpec

HIDDEN, FFN = 2048, 5632
LINEARS = [(HIDDEN, HIDDEN)] * 4 + [(FFN, HIDDEN)] * 2 + [(HIDDEN, FFN)]


def huge(size: int) -> torch.Tensor:
    """uint8 [size], anonymous memory on 2 MiB pages where the system has them."""
    memory = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % (2 << 20) :][:size]


class Model:
    """The linears of ``layers`` layers, their words one after another as in a checkpoint, and x and y for m rows."""

    def __init__(self, layers: int, group_size: int) -> None:
        self.bytes = layers * sum(n * k // 4 for n, k in LINEARS)
        self.words = huge(self.bytes)
        ternary = torch.tensor([a | b << 2 | c << 4 | d << 6 for a in range(3) for b in range(3) for c in range(3)
                                for d in range(3)], dtype=torch.uint8)  # fmt: skip
        for part in self.words.split(1 << 26):
            part.copy_(ternary[torch.randint(0, 81, part.shape)])
        self.scales = [
            (0.02 * torch.rand(1 if group_size < 0 else k // group_size, n)).half()
            for _ in range(layers)
            for n, k in LINEARS
        ]
        self.structs, at = [], self.words.data_ptr()
        for scales, (n, k) in zip(self.scales, LINEARS * layers, strict=True):
            self.structs.append(native.Int2Struct(at, scales.data_ptr(), None, n, k, group_size, 1.0))
            at += n * k // 4
        self.weights = layers * sum(n * k for n, k in LINEARS)
        self.scale_bytes = sum(s.nbytes for s in self.scales)

    def run(self, x: torch.Tensor, y: torch.Tensor, act_bits: int, threads: int) -> None:
        gemm, m = native.cpu().trirun_cpu_int2_gemm, x.shape[0]
        for w in self.structs:
            code = gemm(
                byref(w), w.n, w.k, x.data_ptr(), 0, m, FFN, None, y.data_ptr(), FFN, act_bits, threads
            )  # fmt: skip
            native.check_cpu(code, f"bench: [{w.n}, {w.k}], m={m}")


def check(isa: str, group_size: int, act_bits: int, m: int) -> None:
    """Raises AssertionError unless this configuration is right on a small matrix."""
    generator = torch.Generator().manual_seed(m)
    n, k = 192, 1024
    spec = QuantSpec(group_size, 1.0)
    w = pack(torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator),
             torch.rand(n, spec.groups(k), generator=generator).half(), spec)  # fmt: skip
    x = torch.randn(m, k, generator=generator)
    results = []
    for name in ("portable", isa):
        set_isa(name)
        results.append(run_one(w, x, act_bits))
    want = (x if act_bits == 16 else int8_round_trip(x)).double() @ dequantize(w, torch.float64).T
    error = float((results[1].double() - want).norm() / want.norm())
    assert torch.equal(results[0], results[1]), f"{isa} is not portable, bit for bit"
    assert error < (3e-4 if act_bits == 16 else 1e-6), f"{isa}: relative error {error}"


def run_one(w: PackedWeight, x: torch.Tensor, act_bits: int) -> torch.Tensor:
    return cpu.int2_gemm(x, w.words, w.scales, None, None, w.n, w.k, w.spec.group_size, w.spec.zero, act_bits)


def set_isa(name: str) -> None:
    native.check_cpu(native.cpu().trirun_cpu_set_isa(name.encode()), f"this machine has no {name}")


def spread_threads() -> None:
    """Pins the caller and the pool's threads to a CPU each: on a busy machine the scheduler may leave two on one."""
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        rank = int(name.removeprefix("trirun-")) if name.startswith("trirun-") else 0
        if rank or int(task.name) == os.getpid():
            os.sched_setaffinity(int(task.name), {rank % (os.cpu_count() or 1)})


def measure(model: Model, m: int, act_bits: int, threads: int, seconds: float) -> dict[str, float]:
    x, y = huge(m * FFN * 4).view(torch.float32).view(m, FFN), huge(m * FFN * 4).view(torch.float32).view(m, FFN)
    x.normal_()
    read = native.cpu().trirun_cpu_read
    checksum = ctypes.c_uint64()
    model.run(x, y, act_bits, threads)
    spread_threads()
    reads, products, end = [], [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(reads) < 3:
        start = time.perf_counter()
        read(model.words.data_ptr(), model.bytes, threads, byref(checksum))
        middle = time.perf_counter()
        model.run(x, y, act_bits, threads)
        reads.append(middle - start)
        products.append(time.perf_counter() - middle)
    # Per byte of words and scales, so that grouped weights are not charged for what they have to read besides.
    per_byte = (model.bytes + model.scale_bytes) / model.bytes
    ratios = [r * per_byte / p for r, p in zip(reads, products, strict=True)]
    return {
        "read_gb_s": model.bytes / min(reads) * 1e-9,
        "gb_s": (model.bytes + model.scale_bytes) / min(products) * 1e-9,
        "fraction_of_read": min(reads) * per_byte / min(products),
        "median_fraction": statistics.median(ratios),
        "top_s": 2 * model.weights * m / min(products) * 1e-12,
        "ms": min(products) * 1e3,
    }


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--m", type=numbers, default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--act-bits", type=numbers, default=[8, 16])
    parser.add_argument("--group-size", type=numbers, default=[-1, 128])
    parser.add_argument("--isa", type=lambda text: text.split(","), default=[cpu.backend()])
    parser.add_argument("--seconds", type=float, default=2.0, help="per configuration")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    for group_size in args.group_size:
        model = Model(args.layers, group_size)
        for isa in args.isa:
            for act_bits in args.act_bits:
                for m in args.m:
                    check(isa, group_size, act_bits, m)
                    row = {"isa": isa, "group_size": group_size, "act_bits": act_bits, "m": m}
                    row |= measure(model, m, act_bits, args.threads, args.seconds)
                    row["tokens_per_s_24_layers"] = m / row["ms"] * 1e3 * args.layers / 24
                    print(json.dumps(row) if args.json else render(row), flush=True)


def render(row: dict) -> str:
    return (
        f"{row['isa']:>10}  g {row['group_size']:>4}  act {row['act_bits']:>2}  m {row['m']:>4}   "
        f"read {row['read_gb_s']:5.1f} GB/s   gemm {row['gb_s']:5.1f} GB/s = {row['fraction_of_read']:4.0%} "
        f"(median {row['median_fraction']:4.0%})   {row['top_s']:6.3f} TOP/s   "
        f"{row['tokens_per_s_24_layers']:7.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
