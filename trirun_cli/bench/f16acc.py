"""``trirun bench f16acc``: the fp16-accumulating product beside cuBLAS, speed over sizes and error over splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from trirun_kernels.f16acc.ops import chunk_length, f16acc_gemm

from ..errors import CheckFailed
from .plot import require_matplotlib, save_figure
from .timing import copies, interleaved

# The original's accuracy picture: one row of a product of 14336 columns, normal times 0.1 · normal, σ about 12.
PICTURE_N, PICTURE_K, PICTURE_ROWS = 4096, 14336, 512
# gpu_poor on an H200: (splits, largest, RMS error) of that row, its sums of chunks in fp16; and its 10^12 operations
# per second for 4096³. Its own picture of speed is of an RTX 4090.
ORIGINAL_ERRORS = ((1, 0.350, 0.0522), (8, 0.080, 0.0193), (16, 0.068, 0.0153), (32, 0.093, 0.0145))
ORIGINAL_TFLOPS = (42.0, 47.0)
# Error allowed beside that of fp32 sums, both with the rounding of the result: the default's chunks have 2.7 (README).
ERROR_RATIO = 3.5


@dataclass(frozen=True, slots=True)
class Speed:
    """One size [size, size]² by one contestant: median of rounds in microseconds, 10^12 operations per second."""

    size: int
    contestant: str
    us: float
    spread_us: float

    @property
    def tflops(self) -> float:
        return 2 * self.size**3 / self.us * 1e-6


@dataclass(frozen=True, slots=True)
class Error:
    """|y - float64| over one row: 5th percentile (``low``), quartiles, largest, root mean square. ``splits`` is 0
    for our default and for cuBLAS, ``chunk`` for cuBLAS."""

    contestant: str
    splits: int
    chunk: int
    low: float
    quarter: float
    median: float
    three_quarters: float
    largest: float
    rms: float


def multiply_cublas(a: Tensor, b: Tensor, *, half: bool) -> Tensor:
    """``a @ b.T`` by torch, with fp16 sums in cuBLAS where ``half``."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = half
    try:
        return torch.mm(a, b.t())
    finally:
        matmul.allow_fp16_accumulation = before


def contestants(device: torch.device) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Who is measured on a device, ours first."""
    if device.type != "cuda":
        return {"trirun": f16acc_gemm, "torch": lambda a, b: torch.mm(a, b.t())}
    return {
        "trirun": f16acc_gemm,
        "cuBLAS fp32 sums": partial(multiply_cublas, half=False),
        "cuBLAS fp16 sums": partial(multiply_cublas, half=True),
    }


def speeds(sizes: Sequence[int], device: torch.device, seconds: float) -> Iterator[Speed]:
    """Check each square product against float64, then time everyone in turn, operands from memory.

    Raises:
        CheckFailed: our product is wrong; it was not timed.
    """
    generator = torch.Generator(device).manual_seed(0)
    for size in sizes:
        # Pairs of operands enough that the first is in no cache any more when the last has been read.
        count = copies(2 * size * size * torch.float16.itemsize, device)
        pairs = [operands(size, size, size, generator, device) for _ in range(count)]
        check(*pairs[0])
        calls = {name: [partial(call, *pair) for pair in pairs] for name, call in contestants(device).items()}
        for name, timing in interleaved(calls, device, seconds).items():
            yield Speed(size, name, timing.median * 1e6, timing.spread * 1e6)


def operands(m: int, n: int, k: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """a [m, k] normal, b [n, k] a tenth of it, float16."""
    a, b = (torch.randn(rows, k, generator=generator, device=device) for rows in (m, n))
    return a.half(), (b * 0.1).half()


def check(a: Tensor, b: Tensor) -> None:
    """Raises CheckFailed unless our product of a and b is near float64's on at most 64 rows, and finite everywhere."""
    y = f16acc_gemm(a, b)
    picked = torch.linspace(0, a.shape[0] - 1, min(64, a.shape[0]), device=a.device).long()
    expected = a[picked].double() @ b.double().t()
    ours = (y[picked].double() - expected).square().mean().sqrt().item()
    least = (expected.half().double() - expected).square().mean().sqrt().item()
    if not (y.isfinite().all() and ours <= ERROR_RATIO * least):
        shape = f"m={a.shape[0]} n={b.shape[0]} k={a.shape[1]}"
        raise CheckFailed(
            f"f16acc_gemm {shape}: RMS error {ours:.2e}, at most {ERROR_RATIO} × {least:.2e} allowed; nothing was timed"
        )


def errors(splits: Sequence[int], device: torch.device) -> Iterator[Error]:
    """The first row of the original's product for each number of splits, for our default (splits 0), and of cuBLAS."""
    rows = PICTURE_ROWS if device.type == "cuda" else 1  # a CPU runs the slow reference, row by row the same
    a, b = operands(rows, PICTURE_N, PICTURE_K, torch.Generator(device).manual_seed(0), device)
    expected = a[:1].double() @ b.double().t()
    for name, call in contestants(device).items():
        if name != "trirun":
            yield _error(name, 0, 0, call(a, b)[:1], expected)
    for count in (0, *splits):
        y = f16acc_gemm(a, b, splits=count or None)
        yield _error("trirun", count, chunk_length(PICTURE_K, count or None), y[:1], expected)


def _error(name: str, splits: int, chunk: int, row: Tensor, expected: Tensor) -> Error:
    distance = (row.double() - expected).abs().flatten()
    marks = torch.tensor([0.05, 0.25, 0.5, 0.75, 1], dtype=torch.double, device=row.device)
    low, quarter, median, three_quarters, largest = distance.quantile(marks).tolist()
    rms = distance.square().mean().sqrt().item()
    return Error(name, splits, chunk, low, quarter, median, three_quarters, largest, rms)


def save_plot(path: Path, title: str, measured: Sequence[Speed], found: Sequence[Error]) -> None:
    """Write a PNG: left, 10^12 operations per second over the size; right, boxes of error over splits."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, boxes) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name in dict.fromkeys(s.contestant for s in measured):
        points = [(s.size, s.tflops) for s in measured if s.contestant == name]
        speed.plot(*zip(*points, strict=True), "o-", label=name)
    speed.plot([4096, 4096], ORIGINAL_TFLOPS, "k_-", label="gpu_poor (H200)")
    speed.set(xlabel="m = n = k", ylabel="10¹² operations per second", title=f"square products, {title}")
    speed.set_ylim(bottom=0)
    speed.grid(alpha=0.3)
    speed.legend(fontsize="small")

    stats = [
        {"label": _label(e), "whislo": e.low, "q1": e.quarter, "med": e.median, "q3": e.three_quarters,
         "whishi": e.largest}
        for e in found
    ]  # fmt: skip
    boxes.bxp(stats, showfliers=False)
    boxes.plot(range(1, len(found) + 1), [e.rms for e in found], "D", color="C0", markersize=4, label="RMS")
    for splits, largest, rms in ORIGINAL_ERRORS:
        places = [i + 1 for i, e in enumerate(found) if e.contestant == "trirun" and e.splits == splits]
        boxes.plot(places, [largest] * len(places), "k_", markersize=12)
        boxes.plot(places, [rms] * len(places), "kD", markersize=4, fillstyle="none")
    boxes.plot([], [], "k_", markersize=12, label="gpu_poor, largest")
    boxes.plot([], [], "kD", markersize=4, fillstyle="none", label="gpu_poor, RMS")
    boxes.set(yscale="log", ylabel="|error| against float64", xlabel="whiskers: 5th percentile and largest")
    boxes.set_title(f"one row of [{PICTURE_ROWS}, {PICTURE_K}] · [{PICTURE_K}, {PICTURE_N}]")
    pyplot.setp(boxes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    boxes.grid(alpha=0.3)
    boxes.legend(fontsize="small")
    save_figure(figure, path)


def _label(e: Error) -> str:
    if e.contestant != "trirun":
        return e.contestant
    return f"splits = {e.splits}" if e.splits else f"default ({e.chunk})"
