"""Output heads on a GPU, in 16, 12 and 8 bits: their bytes are what a step of few rows waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.cpu import DTYPES
from ..native import check_cuda, limits
from ..native import cuda as library
from ..weights.twelve_bits import BLOCK, TwelveBits

# Rows of x up to which the weight is read once for every 64 of them; beyond, pieces of it are made 16 bits wide, which
# costs twice as much memory traffic as such a pass but once for all rows.
PASSES = 4
# Rows of the weight that are converted at a time: 128 MiB of a 16-bit weight with 4096 columns.
PIECE = 16384
# Columns of a 16-bit head of few rows, at least: of fewer cuBLAS is faster (kernels/LOG.md).
FEWEST_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class HalfProjection:
    """``y = x @ weight.T`` in 16 bits, on the current device and stream: up to :attr:`few` rows by kernels that begin
    while the one before ends (csrc/cuda/head), more by cuBLAS.

    Attributes:
        weight: float16 or bfloat16 [n, k], contiguous, on the device; n a multiple of 8.
        few: rows that the kernels take, at most; 0 where they are not for this device, or not for k.
        compact: the weight once more, for few rows, where its numbers are bfloat16's, as those of most checkpoints are:
            three quarters of the bytes, and of the time.
    """

    weight: Tensor
    few: int = field(init=False, compare=False)
    compact: TwelveBits | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        w, k = self.weight, self.weight.shape[1]
        taken = w.is_cuda and torch.cuda.get_device_capability(w.device) == (9, 0)
        taken = taken and FEWEST_COLUMNS <= k <= limits().head_16bit_columns and k % 32 == 0
        object.__setattr__(self, "few", limits().head_16bit_rows if taken else 0)
        narrow = taken and k <= limits().head_12bit_columns and k % BLOCK == 0
        object.__setattr__(self, "compact", TwelveBits.of(w) if narrow else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, in either form."""
        return self.weight.nbytes + (0 if self.compact is None else self.compact.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: of the weight's dtype [m, k], contiguous → [m, n].

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        (m, k), n = x.shape, self.weight.shape[0]
        if m > self.few:
            return F.linear(x, self.weight)
        y, stream = torch.empty((m, n), dtype=x.dtype, device=x.device), torch.cuda.current_stream().cuda_stream
        rows, out = (x.data_ptr(), DTYPES[x.dtype], m, k, x.stride(0)), (n, y.data_ptr(), n, stream)
        name, tensors = "head_16bit", [self.weight]
        if self.compact is not None:
            name, tensors = "head_12bit", [self.compact.blocks, self.compact.records, self.compact.counter]
        code = getattr(library(), f"trirun_cuda_{name}")(*rows, *(t.data_ptr() for t in tensors), *out)
        check_cuda(code, f"{name}: x {x.dtype} {list(x.shape)}, {n} outputs")
        return y


@dataclass(frozen=True, slots=True)
class Int8Projection:
    """``y = x @ weight.T`` with weight = scale · (byte − 128), on the current device and stream.

    Attributes:
        rows: uint8 [n, k padded to 16], on the device. scales: float32 [n]. k: the true width.
    """

    rows: Tensor
    scales: Tensor
    k: int

    @classmethod
    def of(cls, head: Tensor) -> Int8Projection:
        """A head [n, k] of floats in 8 bits, a scale per row: the nearest of 255 levels between ±max, as
        :func:`trirun_kernels.decoder.cpu.quantize_head` makes them."""
        n, k = head.shape
        rows = torch.full((n, -(-k // 16) * 16), 128, dtype=torch.uint8, device=head.device)
        scales = torch.empty(n, device=head.device)
        for part in _pieces(n):
            values = head[part].float()
            scale = values.abs().amax(1) / 127
            codes = (values / scale.clamp(min=1e-30).unsqueeze(1)).round().clamp(-127, 127)
            rows[part, :k], scales[part] = (codes + 128).to(torch.uint8), scale
        return cls(rows, scales, k)

    @property
    def n(self) -> int:
        """Output features."""
        return self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales."""
        return self.rows.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: float16 or bfloat16 [m, k], contiguous → [m, n].

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        y = torch.empty((x.shape[0], self.n), dtype=x.dtype, device=x.device)
        step = limits().head_int8_rows
        if x.shape[0] > PASSES * step:
            for part in _pieces(self.n):
                y[:, part] = F.linear(x, self._dense(part, x.dtype))
            return y
        for first in range(0, x.shape[0], step):
            self._multiply(x[first : first + step], y[first : first + step])
        return y

    def dequantize(self) -> Tensor:
        """The weight, float32 [n, k]."""
        return self._dense(slice(0, self.n), torch.float32)

    def _dense(self, part: slice, dtype: torch.dtype) -> Tensor:
        codes = self.rows[part, : self.k].to(dtype).sub_(128)
        # The product is one of float32, rounded once.
        return torch.mul(codes, self.scales[part].unsqueeze(1), out=codes)

    def _multiply(self, x: Tensor, y: Tensor) -> None:
        code = library().trirun_cuda_head_int8(
            x.data_ptr(), DTYPES[x.dtype], x.shape[0], self.k, x.stride(0), self.rows.data_ptr(),
            self.scales.data_ptr(), self.n, self.rows.stride(0), y.data_ptr(), y.stride(0),
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        check_cuda(code, f"head_int8: x {x.dtype} {list(x.shape)}, {self.n} outputs")


def _pieces(n: int) -> Iterator[slice]:
    return (slice(first, min(first + PIECE, n)) for first in range(0, n, PIECE))
