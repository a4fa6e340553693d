"""A quantized weight before packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels import PackedWeight, QuantSpec, pack, unpack
from trirun_kernels.weights.packing import dequantize_codes

from ..errors import QuantizationError


@dataclass(frozen=True, slots=True)
class Quantized:
    """One weight on its 2-bit grid, ``w = scales · (codes − zero)`` in natural (unpacked) order.

    Attributes:
        codes: uint8 [n, k], values 0..3.
        scales: fp16 [n, k/group_size]; [n, 1] for group size -1.
        zeros: fp16, shaped as scales, when ``spec.zero`` is None; otherwise None.
        spec: the grid.

    Raises:
        QuantizationError: shapes or dtypes contradict each other.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    spec: QuantSpec

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise QuantizationError(f"codes must be uint8 [n, k], got {self.codes.dtype} {list(self.codes.shape)}")
        groups = (self.n, self.spec.groups(self.k))
        if (self.zeros is None) != (self.spec.zero is not None):
            raise QuantizationError(f"zeros belong to a grid with zero=None, and this grid has zero={self.spec.zero}")
        for name, value in (("scales", self.scales), ("zeros", self.zeros)):
            if value is not None and (tuple(value.shape) != groups or value.dtype != torch.float16):
                raise QuantizationError(f"{name} must be float16 {list(groups)}, got {value.dtype} {list(value.shape)}")

    @property
    def n(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[1]

    def to(self, device: torch.device | str) -> Quantized:
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Quantized(self.codes.to(device), self.scales.to(device), zeros, self.spec)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense [n, k] weight, evaluated in float32 from the stored fp16 scales, then rounded to ``dtype``."""
        return dequantize_codes(self.codes, self.scales, self.spec, self.zeros).to(dtype)

    def pack(self) -> PackedWeight:
        """The tile64 form, verified by unpacking it again.

        Raises:
            trirun_kernels.PackError: a code or scale has no stored form (a code above 3, an infinite scale).
            QuantizationError: what was unpacked differs from what was packed.
        """
        packed = pack(self.codes, self.scales, self.spec, self.zeros)
        sources = (self.codes, self.scales, self.zeros)
        for name, was, read in zip(("codes", "scales", "zeros"), sources, unpack(packed), strict=True):
            if was is not None and (read is None or not torch.equal(was, read)):
                raise QuantizationError(f"{name} [{self.n}, {self.k}] changed on their way through tile64")
        return packed
