"""What a plan depends on, and what it is: problem, device, kernels, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ..native import limits
from .table import table

# TRIRUN_KERNEL_* of csrc/trirun.h
STREAM, STREAM_SM80, GROUPS, PREFILL_WGMMA, PREFILL_SM80, PREFILL_W2A8, DEQUANTIZE, SPANS = range(1, 9)
PREFILL = (PREFILL_WGMMA, PREFILL_SM80, PREFILL_W2A8)


@dataclass(frozen=True, slots=True)
class Device:
    """What the choice depends on: ``arch``, 10 · major + minor of the compute capability, and its multiprocessors."""

    arch: int
    sms: int

    def clusters(self, size: int) -> int:
        """Clusters of ``size`` CTAs, each CTA with a multiprocessor to itself, that run at once."""
        return _clusters(self.sms)[size]


@cache
def _clusters(sms: int) -> dict[int, int]:
    measured = table("device")
    return {size: int(sms * (count / measured["sms"])) for size, count in measured["clusters"].items()}


class Plan(NamedTuple):
    """``trirun_cuda_plan`` of csrc/trirun.h, field by field; 0 where a kernel does not use one."""

    kernel: int
    tile_m: int = 0
    tile_n: int = 0
    warps: int = 0
    warp_split: int = 0
    cta_split: int = 0
    stages: int = 0
    ctas: int = 0
    fused: int = 0
    early: int = 0
    x_first: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """y[m, n] = x[m, k] · wᵀ on a device.

    Attributes:
        n, k: padded sizes of the stored weight (multiples of 64 and 128).
        m: rows of x, at least 1.
        group_size: -1, 32, 64 or 128. act_bits: 8 or 16.
        quantized: x comes from ``trirun::quantize_activations``; such a product stays on the decode kernels.
        wide: x is float32, which only the decode kernels keep exact (more rows than they take run in pieces).
        apart: x cannot be read by vectors (:func:`..gemm.cuda.reads_vectors`): a kernel of its own must quantize it.
        plain: the zero point is one number in quarters, which is exact beside the codes (prefill).
        dense: the caller can multiply by a dense weight itself; only then is the answer ever DEQUANTIZE.
    """

    n: int
    k: int
    m: int
    group_size: int
    act_bits: int
    device: Device
    quantized: bool = False
    wide: bool = False
    apart: bool = False
    plain: bool = True
    dense: bool = False

    @property
    def limbs(self) -> int:
        """int8 limbs of a value of x."""
        return 2 if self.act_bits == 16 else 1

    @property
    def grouped(self) -> bool:
        """Whether scales cover groups of columns instead of whole rows of w."""
        return self.group_size != -1

    @property
    def scale(self) -> str:
        """The word of the tables' rules."""
        return "group" if self.grouped else "channel"

    @property
    def n_tiles(self) -> int:
        """n tiles of w: 64 out_features each."""
        return self.n // limits().n_tile

    @property
    def k_tiles(self) -> int:
        """k tiles of w: 128 columns each."""
        return self.k // limits().k_tile

    @property
    def weights(self) -> int:
        """Elements of w, padding included."""
        return self.n * self.k

    def with_rows(self, m: int) -> Problem:
        """The same weight with ``m`` rows of x."""
        return replace(self, m=m)
