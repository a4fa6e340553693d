"""int2_gemm on CUDA tensors: choose a plan, hand pointers to libtrirun_cuda.so, turn its codes into exceptions."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..native import Int2Struct, PlanStruct, check_cuda, limits
from ..native import cuda as library
from ..plan.problem import DEQUANTIZE, PREFILL, SPANS, Device, Plan
from ..plan.select import select
from ..weights.packing import PackedWeight
from .cpu import DTYPES, rows_of
from .workspace import launching, workspace


@cache
def device_of(index: int) -> Device:
    """What :func:`select` needs to know of a device."""
    properties = torch.cuda.get_device_properties(index)
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Int2Product:
    """``y = x @ weight.T + bias`` on the current device and stream: what a call needs beside x is made once.

    Attributes:
        weight: on the device. bias: [n] of x's dtype, contiguous, or None.
        act_bits: 16 or 8.
        dense: whether many rows may multiply a dense copy of the weight, made for the call, where that is faster.
    """

    weight: PackedWeight
    bias: Tensor | None = None
    act_bits: int = 16
    dense: bool = False
    _struct: Int2Struct = field(init=False, repr=False, compare=False)
    _plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_struct", Int2Struct.of(self.weight))
        object.__setattr__(self, "_plain", self.weight.spec.has_plain_zero)

    @property
    def shape_key(self) -> tuple[int, int, int, int]:
        """What plans depend on: padded sizes, group size, activation bits."""
        return self._struct.n, self._struct.k, self._struct.group_size, self.act_bits

    def __call__(self, x: Tensor) -> Tensor:
        """x: [m, k], unit column stride, rows apart from each other → [m, n].

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        y = torch.empty((x.shape[0], self.weight.n), dtype=x.dtype, device=x.device)
        if x.dtype != torch.float32:
            self._multiply(x, y)
            return y
        # float32 keeps its accuracy only on the limb kernels: more rows than they take go through in pieces.
        step = limits().decode_rows if device_of(x.device.index).arch == 90 else 4
        for first in range(0, x.shape[0], step):
            part = x[first : first + step]
            self.run(part, y[first : first + step], self.plan(part.shape[0], x.device, wide=True))
        return y

    def of_limbs(self, limbs: Tensor, m: int, dtype: torch.dtype, plan: Plan | None = None) -> Tensor:
        """The int8 limbs of m rows (a uint8 buffer, see :mod:`trirun_kernels.gemm.activations`) → [m, n] of ``dtype``,
        under a given plan or the chosen one.

        Raises:
            ValueError: no decode kernel takes so many rows.
            NativeError: the library refused the call; the message has the shapes.
        """
        w, bias = self.weight, self.bias
        y = torch.empty((m, w.n), dtype=dtype, device=limbs.device)
        plan = plan or self.plan(m, limbs.device, quantized=True)
        struct, size, counts = _prepared(self.shape_key, m, DTYPES[dtype], limbs.device.index, plan, True)
        stream = _stream()
        with launching:
            address, held = workspace(limbs.device, stream, size, counts=counts)
            code = library().trirun_cuda_int2_gemm_quantized(
                ctypes.byref(self._struct), w.n, limbs.data_ptr(), m, None if bias is None else bias.data_ptr(),
                y.data_ptr(), DTYPES[dtype], w.n, self.act_bits, ctypes.byref(struct), address, held, stream,
            )  # fmt: skip
        if code:
            what = f"m={m}, n={w.n}, k={w.k}, {w.spec}, act_bits={self.act_bits}, {plan}"
            check_cuda(code, f"int2_gemm_quantized: {what}")
        return y

    def reads_limbs(self, m: int) -> bool:
        """Whether :meth:`of_limbs` has a kernel for m rows on the weight's device, and a fast one: the per-span kernel
        gives x scales of its own and reads no 16-bit limbs, nor does a prefill tile, but with more than 8 rows they are
        faster than those that do by more than it takes to quantize x (kernels/README.md)."""
        device = self.weight.words.device
        try:
            of_limbs = self.plan(m, device, quantized=True)
        except ValueError:
            return False
        return m <= 8 or of_limbs.kernel == SPANS or self.plan(m, device).kernel not in (SPANS, *PREFILL)

    def plan(
        self, m: int, device: torch.device, *, quantized: bool = False, wide: bool = False, apart: bool = False
    ) -> Plan:
        """The plan for m rows; arguments as in :class:`~trirun_kernels.plan.problem.Problem`."""
        return select(
            self._struct.n, self._struct.k, m, self._struct.group_size, self.act_bits, device_of(device.index),
            quantized=quantized, wide=wide, apart=apart, plain=self._plain, dense=self.dense,
        )  # fmt: skip

    def run(self, x: Tensor, y: Tensor, plan: Plan) -> None:
        """One launch under a given plan: x [m, k] with unit column stride, y [m, n]."""
        w, bias, m, dtype = self.weight, self.bias, x.shape[0], DTYPES[x.dtype]
        struct, size, counts = _prepared(self.shape_key, m, dtype, x.device.index, plan, False)
        stream = _stream()
        with launching:
            address, held = workspace(x.device, stream, size, counts=counts)
            code = library().trirun_cuda_int2_gemm(
                ctypes.byref(self._struct), w.n, w.k, x.data_ptr(), dtype, m, x.stride(0),
                None if bias is None else bias.data_ptr(), y.data_ptr(), y.stride(0), self.act_bits,
                ctypes.byref(struct), address, held, stream,
            )  # fmt: skip
        if code:
            what = f"x {x.dtype} {list(x.shape)}, n={w.n}, {w.spec}, act_bits={self.act_bits}, {plan}"
            check_cuda(code, f"int2_gemm: {what}")

    def _multiply(self, x: Tensor, y: Tensor) -> None:
        m, w = x.shape[0], self.weight
        if m == 0:
            return
        plan = self.plan(m, x.device, apart=not reads_vectors(x, self.act_bits))
        if plan.kernel == DEQUANTIZE:
            dense = torch.empty((w.n, w.k), dtype=x.dtype, device=x.device)
            self.run(dense, dense, plan)
            torch.matmul(x, dense.T, out=y) if self.bias is None else torch.addmm(self.bias, x, dense.T, out=y)
            return
        if plan.kernel in PREFILL and (x.data_ptr() % 16 or x.stride(0) % 8):
            # The copy engine reads rows that start on 16 bytes.
            aligned = torch.empty((m, -(-w.k // 8) * 8), dtype=x.dtype, device=x.device)
            aligned[:, : w.k] = x
            x = aligned[:, : w.k]
        self.run(x, y, plan)


def run_plan(x: Tensor, w: PackedWeight, bias: Tensor | None, y: Tensor, act_bits: int, plan: Plan) -> None:
    """One launch under a given plan, on the current device and stream: x [m, k] with unit column stride, y [m, n].

    Tests and tuning sweeps call this; everything else leaves the plan to :func:`trirun_kernels.plan.select.select`.
    """
    Int2Product(w, bias, act_bits).run(x, y, plan)


def reads_vectors(x: Tensor, act_bits: int) -> bool:
    """Whether a kernel can read 16-bit rows x [m, k] by what its prologue takes at once: two numbers, or eight of rows
    that it copies whole, for 8-bit activations."""
    at_once = 8 if act_bits == 8 else 2
    return not (x.shape[1] % at_once or x.stride(0) % at_once or x.data_ptr() % (2 * at_once))


def int2_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    zero: float,
    act_bits: int,
) -> Tensor:
    """The CUDA implementation of ``trirun::int2_gemm``; arguments as in :mod:`trirun_kernels.gemm.ops`.

    Raises:
        NativeError: the library is missing, or refused the call; the message has the shapes.
    """
    w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
    rows, m, stride = rows_of(x, k)
    if rows.stride(0) < k:  # of one row torch leaves it open
        rows = rows.as_strided((m, k), (stride, 1))
    with torch.cuda.device(x.device):
        y = Int2Product(w, _contiguous(bias), act_bits, dense=True)(rows)
    return y.view(*x.shape[:-1], n)


def quantize_activations(x: Tensor, act_bits: int) -> Tensor:
    """The CUDA implementation of ``trirun::quantize_activations``: x [m, k], m at most 64, to uint8 [bytes]."""
    k = x.shape[1]
    rows, m, stride = rows_of(x, k)
    if not 0 < m <= limits().decode_rows:
        raise ValueError(f"quantize_activations: x has {m} rows; 1 to {limits().decode_rows} are supported")
    k_pad = -(-k // limits().k_pad) * limits().k_pad
    with torch.cuda.device(x.device):
        size = activation_bytes(m, k_pad, act_bits)
        out = torch.empty(size, dtype=torch.uint8, device=x.device)
        code = library().trirun_cuda_quantize(
            rows.data_ptr(), DTYPES[x.dtype], m, k, stride, k_pad, act_bits, out.data_ptr(), size, _stream()
        )
    check_cuda(code, f"quantize_activations: x {x.dtype} {list(x.shape)}, act_bits={act_bits}")
    return out


def activation_bytes(m: int, k_pad: int, act_bits: int) -> int:
    """Bytes of the quantized form of m rows: ``ActivationLayout`` of csrc/cuda/common/activations.cuh."""
    return library().trirun_cuda_activation_bytes(m, k_pad, act_bits)


def int2_gemm_quantized(
    activations: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    m: int,
    group_size: int,
    zero: float,
    act_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The CUDA implementation of ``trirun::int2_gemm_quantized``: activations of ``m`` rows to [m, n] of ``dtype``."""
    w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
    with torch.cuda.device(activations.device):
        size = activation_bytes(m, w.words.shape[1] * 32, act_bits)
        if activations.numel() != size or not activations.is_contiguous():
            raise ValueError(f"int2_gemm_quantized: {activations.numel()} bytes for m={m}, k={k}; expected {size}")
        return Int2Product(w, _contiguous(bias), act_bits).of_limbs(activations, m, dtype)


@lru_cache(maxsize=1 << 14)
def _prepared(
    shape: tuple[int, int, int, int], m: int, dtype: int, device: int, plan: Plan, quantized: bool
) -> tuple[PlanStruct, int, bool]:
    """A plan as C takes it, the bytes of its workspace on a device, and whether it needs zeros in the counters."""
    (n, k, group_size, act_bits), struct = shape, PlanStruct(*plan)
    weight = Int2Struct(n=n, k=k, group_size=group_size)
    size = library().trirun_cuda_int2_workspace(ctypes.byref(weight), m, dtype, act_bits, ctypes.byref(struct))
    return struct, size, bool(library().trirun_cuda_plan_needs_zeros(ctypes.byref(struct), quantized))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.is_contiguous() else bias.contiguous()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
