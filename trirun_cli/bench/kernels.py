"""``trirun bench kernels``: each product is checked against float64, then timed beside its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trirun_kernels.gemm.reference import int8_round_trip
from trirun_kernels.weights.packing import PackedWeight, dequantize
from trirun_kernels.weights.spec import QuantSpec

from ..errors import CheckFailed
from ..models.synthetic import random_ternary
from .peers import Peer, peers_for
from .probe import reader
from .shapes import Shape
from .timing import Call, Timing, copies, from_memory, interleaved, matrix_peak, read_bandwidth

# Allowed error over that of torch's 16-bit product on the dense weight, by the type of the sums (fp16: 2.7 times on
# normal x, and x has outliers here). With 8-bit activations only the output is rounded: relative errors by its type.
ERROR_RATIO = {"fp32": 1.5, "fp16": 4.0}
ERROR_ACT8 = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. Measured itself: ``read_gbps`` in 10^9 bytes/s; ``matmul_tflops``, of
    torch's large product (float16 on a GPU, float32 on a CPU), in 10^12 operations/s."""

    device: str
    name: str
    torch: str
    read_gbps: float
    matmul_tflops: float


@dataclass(frozen=True, slots=True)
class Result:
    """One product [m, k] · [n, k]ᵀ.

    Attributes:
        label: of the shape. copies: of the weight, used in turn. relative_error, allowed_error: against float64.
        from_memory: whether all copies are more than the caches hold.
        us, spread_us: trirun's median time and the distance between its quartiles, in microseconds.
        weight_bytes: of the packed weight. floor_us: median time of reading it and nothing else, in the same turns.
        read_gbps: 10^9 bytes/s of memory to hold that against: on a CPU in the same turns, since what else runs on a
            machine takes its share of it; on a GPU the machine's.
        peers_us: median times of the peers, by name.
    """

    label: str
    n: int
    k: int
    m: int
    group_size: int
    act_bits: int
    dtype: str
    accumulate: str
    copies: int
    relative_error: float
    allowed_error: float
    us: float
    spread_us: float
    weight_bytes: int
    floor_us: float
    read_gbps: float
    from_memory: bool
    peers_us: dict[str, float] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.n * self.k * self.m

    def derived(self, machine: Machine) -> dict[str, float | None]:
        """The share of ``read_gbps``, None of weights that stay in the cache; and the speed beside torch's large
        product, torch on this shape, and the fastest other peer. The large product is no limit: int8 arithmetic may be
        several times as fast."""
        dense = [us for name, us in self.peers_us.items() if name.startswith("torch")]
        others = [us for name, us in self.peers_us.items() if not name.startswith("torch")]
        return {
            "read_share": self.weight_bytes / self.us / (self.read_gbps * 1e3) if self.from_memory else None,
            "matmul_ratio": self.flops / (self.us * 1e-6) / (machine.matmul_tflops * 1e12),
            "speedup_torch": min(dense) / self.us if dense else None,
            "speedup_peer": min(others) / self.us if others else None,
        }

    def document(self, machine: Machine) -> dict[str, Any]:
        """The result for --json, with :meth:`derived`."""
        return {**asdict(self), **self.derived(machine)}


def measure_machine(device: torch.device) -> Machine:
    """Measure the limits that results are compared with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return Machine(str(device), name, torch.__version__, read_bandwidth(device) / 1e9, matrix_peak(device) / 1e12)


def run(
    shapes: Sequence[Shape],
    rows: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    group_size: int,
    act_bits: int,
    machine: Machine,
    seconds: float,
    accumulate: str = "fp32",
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Check and time every shape with every row count.

    Args:
        rows: values of m. group_size: weights per scale along k, which it divides, or −1.
        act_bits: 16 or 8. seconds: measuring time per contestant. accumulate: type of the sums, "fp32" or "fp16".
        progress: called with what is measured next.

    Raises:
        CheckFailed: a product is wrong; it was not timed.
    """
    for shape in shapes:
        spec = QuantSpec(group_size, 1.0)
        packed_bytes = max(1, shape.n * shape.k // 4)
        count = copies(packed_bytes, device)
        generator = torch.Generator(device).manual_seed(0)
        first = random_ternary(shape.n, shape.k, spec, generator)
        copied = (replace(first, words=first.words.clone(), scales=first.scales.clone()) for _ in range(count - 1))
        weights = [first, *copied]
        peers = peers_for(shape.n, shape.k, dtype, device, group_size, act_bits)
        for m in rows:
            progress(f"{shape.label} {shape.n} × {shape.k}, m = {m}")
            x = outlier_rows(m, shape.k, dtype, device)
            error, allowed = checked_error(x, weights[0], act_bits, accumulate)
            if not error <= allowed:
                raise CheckFailed(
                    f"{shape} m={m} group_size={group_size} act_bits={act_bits} {dtype}: relative error {error:.2e}, "
                    f"at most {allowed:.2e} allowed; nothing was timed"
                )
            yield _time(shape, m, x, weights, peers, (error, allowed), act_bits, accumulate, machine, seconds)
        del weights, peers


def _time(
    shape: Shape,
    m: int,
    x: Tensor,
    weights: Sequence[PackedWeight],
    peers: Sequence[Peer],
    errors: tuple[float, float],
    act_bits: int,
    accumulate: str,
    machine: Machine,
    seconds: float,
) -> Result:
    from trirun_kernels.gemm.ops import int2_gemm

    ours = [partial(int2_gemm, x, w, act_bits=act_bits, acc=accumulate) for w in weights]
    contestants: dict[str, Sequence[Call]] = {"trirun": ours}
    for peer in peers:
        contestants[peer.name] = peer.calls(x)
    contestants["floor"] = [reader(w.words) for w in weights]
    timings: dict[str, Timing] = interleaved(contestants, x.device, seconds)
    nbytes = weights[0].nbytes
    own, floor = timings.pop("trirun"), timings.pop("floor").median
    memory_gbps = machine.read_gbps if x.device.type == "cuda" else weights[0].words.nbytes / floor * 1e-9
    return Result(
        label=shape.label,
        n=shape.n,
        k=shape.k,
        m=m,
        group_size=weights[0].spec.group_size,
        act_bits=act_bits,
        dtype=str(x.dtype).removeprefix("torch."),
        accumulate=accumulate,
        copies=len(weights),
        relative_error=errors[0],
        allowed_error=errors[1],
        us=own.median * 1e6,
        spread_us=own.spread * 1e6,
        weight_bytes=nbytes,
        floor_us=floor * 1e6,
        read_gbps=memory_gbps,
        from_memory=from_memory(len(weights) * nbytes, x.device),
        peers_us={name: timing.median * 1e6 for name, timing in timings.items()},
    )


def outlier_rows(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal rows with one column in 200 thirty times larger, as activations of language models have them."""
    x = torch.randn(m, k, device=device)
    x[:, torch.randperm(k, device=device)[: max(1, k // 200)]] *= 30
    return x.to(dtype)


def checked_error(x: Tensor, w: PackedWeight, act_bits: int, acc: str = "fp32") -> tuple[float, float]:
    """Relative error of our product against float64, and the error allowed: see :class:`Expected`."""
    from trirun_kernels.gemm.ops import int2_gemm

    expected = Expected(x, w, act_bits)
    return expected.error(int2_gemm(x, w, act_bits=act_bits, acc=acc)), expected.allowed(acc)


class Expected:
    """A product x @ w.T in float64, of three n tiles of w and at most 64 rows of x, for results to be held against.

    Args:
        x: [m, k] of any float type. w: packed [n, k]. act_bits: 16 or 8.
    """

    def __init__(self, x: Tensor, w: PackedWeight, act_bits: int) -> None:
        self._rows = torch.linspace(0, x.shape[0] - 1, min(64, x.shape[0]), device=x.device).long()
        self._act_bits, self._dtype = act_bits, x.dtype
        exact = x[self._rows].double() if act_bits == 16 else int8_round_trip(x[self._rows].float()).double()
        kind = torch.float16 if x.dtype == torch.float32 else x.dtype
        last = (w.n - 1) // 64
        self._parts: list[tuple[slice, Tensor]] = []  # outputs, and what they are
        self._norm = dense_difference = 0.0
        for tile in sorted({0, last // 2, last}):
            first, count = tile * 64, min(64, w.n - tile * 64)
            scales = w.scales[:, first : first + 64].contiguous()
            zeros = None if w.zeros is None else w.zeros[:, first : first + 64].contiguous()
            part = PackedWeight(w.words[tile : tile + 1], scales, zeros, count, w.k, w.spec)
            dense = dequantize(part, torch.float64)
            expected = exact @ dense.t()
            self._parts.append((slice(first, first + count), expected))
            self._norm += float(expected.square().sum())
            theirs = torch.nn.functional.linear(exact.to(kind), dense.to(kind)).double()
            dense_difference += float((theirs - expected).square().sum())
        self._dense_error = self._relative(dense_difference)

    def error(self, y: Tensor) -> float:
        """Relative error of y [m, n]; infinite unless every output is finite."""
        if not y.isfinite().all():
            return float("inf")
        off = (float((y[self._rows, at].double() - e).square().sum()) for at, e in self._parts)
        return self._relative(sum(off))

    def _relative(self, squares: float) -> float:
        # A small weight may be all zeros.
        if not self._norm:
            return float("inf") if squares else 0.0
        return (squares / self._norm) ** 0.5

    def allowed(self, acc: str = "fp32") -> float:
        """Error allowed: 1.5 times that of torch's 16-bit product with 16-bit activations, one rounding of the output
        with 8-bit ones."""
        return ERROR_RATIO[acc] * self._dense_error if self._act_bits == 16 else ERROR_ACT8[self._dtype]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    threads = torch.get_num_threads()
    return f"{names[0] if names else 'CPU'}, {threads} threads"
