"""f16acc_gemm on CUDA tensors: choose a plan, hand pointers to libtrirun_cuda.so, turn its codes into exceptions."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..gemm.cuda import device_of
from ..gemm.workspace import launching, scratch
from ..native import F16AccPlanStruct, check_cuda
from ..native import cuda as library
from ..plan.problem import Device
from ..plan.table import table

MMA, WGMMA = 1, 2  # TRIRUN_F16ACC_*
A, B = 1, 2  # bits of along_rows
TILE_M = 128  # rows of a of one CTA
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class F16AccPlan:
    """``trirun_f16acc_plan`` of csrc/trirun.h, but for what the operands' places in memory decide."""

    kernel: int
    tile_n: int
    chunk: int
    parts: int


@lru_cache(4096)  # a small product does not outlast the choice
def select_f16acc(m: int, n: int, k: int, chunk: int, device: Device) -> F16AccPlan:
    """The kernel and tile for y[m, n] = a[m, k] · b[n, k]ᵀ with fp16 sums over ``chunk`` columns.

    wgmma on Hopper, mma.sync elsewhere. Of tiles of 128 x 128 and 128 x 256, and of numbers of CTAs that share one
    along k (they add up through memory), those that end first.

    Raises:
        ValueError: the device is older than any kernel.
    """
    if device.arch < 80:
        raise ValueError(f"the CUDA kernels need compute capability 8.0 or newer, this device has {device.arch / 10}")
    kernel = WGMMA if device.arch == 90 else MMA
    chunks, costs = max(1, -(-k // chunk)), table("f16acc")
    fixed = costs["tile"]

    def cycles(tile_n: int, parts: int) -> float:
        tiles = -(-m // TILE_M) * -(-n // tile_n)
        if kernel == WGMMA:  # in pairs, two row tiles to the same columns
            tiles = -(-m // (2 * TILE_M)) * 2 * -(-n // tile_n)
        rounds = -(-tiles * parts // device.sms)
        # Exchanging parts: each writes and reads fp32 sums, a few bytes per cycle and multiprocessor.
        exchange = 0 if parts == 1 else fixed + 8 * m * n * parts / (device.sms * 16)
        return rounds * (-(-chunks // parts) * chunk * costs["k_column"][tile_n] + fixed) + exchange

    tiles = (128, 256) if kernel == WGMMA else (128,)
    _, parts, tile_n = min((cycles(t, p), p, -t) for t in tiles for p in SPLITS if p <= chunks)
    return F16AccPlan(kernel, -tile_n, chunk, parts)


def gain(name: str, arch: int) -> float:
    """How many times faster a GPU's tensor cores run with fp16 sums than with fp32 ones: 2 on GeForce from Ampere on,
    which NVIDIA halves the fp32 rate of; 1 on its data-centre and professional GPUs of the same architectures.

    Args:
        name: torch.cuda.get_device_name. arch: 10 · major + minor of the compute capability.
    """
    return 2.0 if "GeForce" in name and arch in (86, 89, 120) else 1.0


def f16acc_gemm(a: Tensor, b: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """The CUDA implementation of ``trirun::f16acc_gemm``; arguments as in :mod:`trirun_kernels.f16acc.reference`.

    Raises:
        NativeError: the library is missing, or refused the call; the message has the shapes.
    """
    m, (n, k) = prod(a.shape[:-1]), b.shape
    if m == 0 or n == 0 or k == 0:
        y = a.new_zeros((m, n)) if bias is None else bias.repeat(m, 1)
    else:
        plan = select_f16acc(m, n, k, chunk, device_of(a.device.index))
        # wgmma's rows of y start on 16 bytes; where n does not keep them there, y is copied out of longer ones.
        y = a.new_empty((m, -(-n // 8) * 8 if plan.kernel == WGMMA else n))[:, :n]
        with torch.cuda.device(a.device):
            run_plan(a.reshape(m, k), b, bias, y, plan)
        y = y.contiguous()
    return y.view(*a.shape[:-1], n)


def run_plan(a: Tensor, b: Tensor, bias: Tensor | None, y: Tensor, plan: F16AccPlan) -> None:
    """One product under a given plan, on the current device and stream: a [m, k], b [n, k], y [m, n], none empty.

    Tests and tuning sweeps call this; everything else leaves the plan to :func:`select_f16acc`.
    """
    (m, n), k = y.shape, a.shape[1]
    # Gradients multiply transposed operands: wgmma takes them as they lie (b, or both), mma.sync takes copies.
    along_b = plan.kernel == WGMMA and not _aligned(b) and _aligned(b.t())
    along_a = along_b and not _aligned(a) and _aligned(a.t())
    a, b = (x if along else _along_k(x) for x, along in ((a, along_a), (b, along_b)))
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 16):
        bias = bias.clone(memory_format=torch.contiguous_format)
    lda, ldb = a.stride(int(along_a)), b.stride(int(along_b))
    struct = F16AccPlanStruct(plan.kernel, plan.tile_n, plan.chunk, plan.parts, A * along_a | B * along_b)
    size, stream = library().trirun_cuda_f16acc_workspace(m, n, ctypes.byref(struct)), torch.cuda.current_stream()
    with launching:
        workspace, held = scratch(a.device, stream.cuda_stream, size)
        code = library().trirun_cuda_f16acc_gemm(
            a.data_ptr(), lda, b.data_ptr(), ldb, None if bias is None else bias.data_ptr(), y.data_ptr(), y.stride(0),
            m, n, k, ctypes.byref(struct), workspace, held, stream.cuda_stream,
        )  # fmt: skip
    check_cuda(code, f"f16acc_gemm: m={m}, n={n}, k={k}, {plan}")


def _aligned(x: Tensor) -> bool:
    """Whether x [rows, columns] lies as the copy engines read it: row by row, each on 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _along_k(x: Tensor) -> Tensor:
    """x, or a copy of it that is aligned."""
    if _aligned(x):
        return x
    held = x.new_empty(x.shape[0], -(-x.shape[1] // 8) * 8)
    held[:, : x.shape[1]] = x
    return held[:, : x.shape[1]]
