"""The decoder's matrix products on CUDA: a step has hundreds, so what a call needs beside x is made once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..f16acc.int2 import FEWEST_ROWS, int2_gemm_f16acc
from ..native import Int2Struct, NativeError
from ..plan.select import PREFILL, RUNS, select
from ..weights.packing import PackedWeight
from .cpu import DTYPES
from .cuda import PlanStruct, device_of, library

# Fewest and most rows that may go from kernel to kernel as digits, which the kernels in between make for nothing.
DIGIT_ROWS = (1, 32)
_LEAST_WORKSPACE = 16 << 20


@dataclass(frozen=True, slots=True)
class Projection:
    """``y = x @ weight.T + bias`` on the current device and stream.

    Attributes:
        weight: packed, or dense [n, k] of the activations' dtype. bias: [n] of that dtype or None.
        act_bits: of a packed weight, 16 or 8.
        acc: of a packed weight, "fp32", or "fp16" for fp16 sums where float16 x has rows enough to gain from them.
    """

    weight: PackedWeight | Tensor
    bias: Tensor | None = None
    act_bits: int = 16
    acc: str = "fp32"
    # Of a packed weight alone.
    _struct: Int2Struct = field(init=False, repr=False, compare=False)
    _plain: bool = field(init=False, default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.weight, PackedWeight):
            object.__setattr__(self, "_struct", Int2Struct.of(self.weight))
            object.__setattr__(self, "_plain", self.weight.spec.has_plain_zero)

    @property
    def packed(self) -> bool:
        return isinstance(self.weight, PackedWeight)

    @property
    def n(self) -> int:
        """Output features."""
        return self.weight.n if isinstance(self.weight, PackedWeight) else self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales."""
        return self.weight.nbytes

    @property
    def shape_key(self) -> tuple[int, int, int, int]:
        """What its plans depend on: padded sizes, group size, activation bits."""
        return self._struct.n, self._struct.k, self._struct.group_size, self.act_bits

    def reads_digits(self, m: int) -> bool:
        """Whether :meth:`of_digits` has a kernel for m rows on the weight's device, and a fast one: the kernel of runs
        gives x scales of its own and reads no 16-bit digits, nor does a prefill tile, but with more than 8 rows they
        are faster than those that do by more than it takes to quantize x (kernels/README.md)."""
        if not isinstance(self.weight, PackedWeight):
            return False
        try:
            of_digits, _ = self._plan(m, torch.float16, self.weight.words.device, True)
        except ValueError:
            return False
        if m <= 8 or of_digits.kernel == RUNS:
            return True
        of_values, _ = self._plan(m, torch.float16, self.weight.words.device, False)
        return of_values.kernel not in (RUNS, *PREFILL)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [m, k], contiguous and its rows on 16 bytes, → [m, n].

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        w = self.weight
        if not isinstance(w, PackedWeight):
            return F.linear(x, w, self.bias)
        m, dtype = x.shape[0], x.dtype
        if self.acc == "fp16" and self.act_bits == 16 and m >= FEWEST_ROWS:
            return int2_gemm_f16acc(x, w, self.bias)
        y = torch.empty((m, w.n), dtype=dtype, device=x.device)
        if m == 0:
            return y
        plan, size = self._plan(m, dtype, x.device, False)
        workspace = _workspace(x.device, size)
        code = library().trirun_cuda_int2_gemm(
            ctypes.byref(self._struct), w.n, w.k, x.data_ptr(), DTYPES[dtype], m, x.stride(0), self._bias, y.data_ptr(),
            w.n, self.act_bits, ctypes.byref(plan), workspace.data_ptr(), workspace.numel(), _stream(),
        )  # fmt: skip
        return y if code == 0 else self._refuse(code, m, dtype)

    def of_digits(self, digits: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Digits of m rows (a uint8 buffer, see :mod:`trirun_kernels.gemm.activations`) → [m, n] of ``dtype``.

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        w = self._packed_weight
        y = torch.empty((m, w.n), dtype=dtype, device=digits.device)
        plan, size = self._plan(m, dtype, digits.device, True)
        workspace = _workspace(digits.device, size)
        code = library().trirun_cuda_int2_gemm_quantized(
            ctypes.byref(self._struct), w.n, digits.data_ptr(), m, self._bias, y.data_ptr(), DTYPES[dtype], w.n,
            self.act_bits, ctypes.byref(plan), workspace.data_ptr(), workspace.numel(), _stream(),
        )  # fmt: skip
        return y if code == 0 else self._refuse(code, m, dtype)

    @property
    def _packed_weight(self) -> PackedWeight:
        assert isinstance(self.weight, PackedWeight)
        return self.weight

    @property
    def _bias(self) -> int | None:
        return None if self.bias is None else self.bias.data_ptr()

    def _plan(self, m: int, dtype: torch.dtype, device: torch.device, quantized: bool) -> tuple[PlanStruct, int]:
        s = self._struct
        return _planned(s.n, s.k, s.group_size, m, DTYPES[dtype], self.act_bits, device.index, quantized, self._plain)

    def _refuse(self, code: int, m: int, dtype: torch.dtype) -> Tensor:
        w, reason = self._packed_weight, library().trirun_cuda_error(code).decode()
        raise NativeError(
            f"decoder: [{m}, {w.k}] by [{w.n}, {w.k}] in {dtype}, {w.spec}, act_bits={self.act_bits}: {reason} "
            f"(code {code})"
        )


@lru_cache(maxsize=1 << 14)
def _planned(
    n: int, k: int, group_size: int, m: int, dtype: int, act_bits: int, device: int, quantized: bool, plain: bool
) -> tuple[PlanStruct, int]:
    """The plan of a product of padded sizes and the bytes of workspace that it takes."""
    choice = select(n, k, m, group_size, act_bits, device_of(device), quantized=quantized, plain=plain)
    plan = PlanStruct.of(choice)
    weight = Int2Struct(n=n, k=k, group_size=group_size)
    size = library().trirun_cuda_int2_workspace(ctypes.byref(weight), m, dtype, act_bits, ctypes.byref(plan))
    return plan, size


# By device, the newest last. A device runs one decoder step at a time, whose kernels share it: its first 64 KiB are
# zeros that every kernel leaves zero. Graphs hold the addresses of those they were captured with, so none is freed.
_workspaces: dict[int, list[Tensor]] = {}


def _workspace(device: torch.device, size: int) -> Tensor:
    held = _workspaces.setdefault(device.index, [])
    if not held or held[-1].numel() < size:
        if torch.cuda.is_current_stream_capturing():
            raise NativeError(f"decoder: {size} bytes of workspace in a capture that no plain call has gone before")
        held.append(torch.zeros(max(size, _LEAST_WORKSPACE), dtype=torch.uint8, device=device))
    return held[-1]


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
