"""``trirun bench f16acc``: the fp16-accumulating product beside cuBLAS, speed over sizes and error over splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from trirun_kernels.f16acc.ops import chunk_length, f16acc_gemm

from ..errors import CheckFailed
from .timing import copies, interleaved

# The product of the original's accuracy plot, of which one row is shown: normal times 0.1 · normal, σ about 12.
PICTURE_N, PICTURE_K, PICTURE_ROWS = 4096, 14336, 512
# gpu_poor on an H200: (splits, largest, RMS error) of that row, its sums of chunks in fp16; and its 10^12 operations
# per second for 4096³. Its own plot of speed is of an RTX 4090.
ORIGINAL_ERRORS = ((1, 0.350, 0.0522), (8, 0.080, 0.0193), (16, 0.068, 0.0153), (32, 0.093, 0.0145))
ORIGINAL_TFLOPS = (42.0, 47.0)
# Allowed error over that of fp32 sums, both with the rounding of the result; the default's chunks have 2.7 (README).
ERROR_RATIO = 3.5


@dataclass(frozen=True, slots=True)
class Speed:
    """A square product of one size by one contestant. ``us``: median of rounds in microseconds; ``spread_us``: the
    distance between the quartiles."""

    size: int
    contestant: str
    us: float
    spread_us: float

    @property
    def tflops(self) -> float:
        """10^12 operations per second."""
        return 2 * self.size**3 / self.us * 1e-6


@dataclass(frozen=True, slots=True)
class Error:
    """|y − float64| over one row: 5th percentile (``low``), quartiles, largest, root mean square.

    Attributes:
        splits: chunks of k; 0 for the default number and for cuBLAS. chunk: columns of k in a chunk; 0 for cuBLAS.
    """

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
    """The products measured on a device by name, trirun's first: a [m, k], b [n, k] float16 → a · bᵀ [m, n]."""
    if device.type != "cuda":
        return {"trirun": f16acc_gemm, "torch": lambda a, b: torch.mm(a, b.t())}
    return {
        "trirun": f16acc_gemm,
        "cuBLAS fp32 sums": partial(multiply_cublas, half=False),
        "cuBLAS fp16 sums": partial(multiply_cublas, half=True),
    }


def speeds(sizes: Sequence[int], device: torch.device, seconds: float) -> Iterator[Speed]:
    """Check each square product against float64, then time the contestants in turn, with operands outside the caches.

    Args:
        sizes: m = n = k. seconds: measuring time per contestant and size.

    Raises:
        CheckFailed: trirun's product is wrong; it was not timed.
    """
    generator = torch.Generator(device).manual_seed(0)
    for size in sizes:
        # So many pairs that the first has left the caches when the last has been read.
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
    """Check trirun's product of a and b: finite everywhere, and near float64's on at most 64 rows.

    Raises:
        CheckFailed: it is not.
    """
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
    """Errors in the first row of the original's product: of cuBLAS, the default (splits 0), each number of splits."""
    rows = PICTURE_ROWS if device.type == "cuda" else 1  # the slow reference on a CPU, row by row the same
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
