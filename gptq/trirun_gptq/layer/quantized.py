"""A quantized weight before packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels import PackedWeight, QuantSpec, pack, unpack
from trirun_kernels.weights.packing import dequantize_codes
from trirun_kernels.weights.shapes import N_TILE

from ..errors import QuantizationError

# Codes that are packed at a time, a byte each.
PIECE_CODES = 1 << 26


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
        """The tile64 form, verified by unpacking it again; a large weight a piece of its rows after another, for the
        memory of an embedding's codes.

        Raises:
            trirun_kernels.PackError: a code or scale has no stored form (a code above 3, an infinite scale).
            QuantizationError: what was unpacked differs from what was packed.
        """
        rows = max(PIECE_CODES // self.k // N_TILE, 1) * N_TILE
        pieces = [self._packed_rows(slice(first, first + rows)) for first in range(0, self.n, rows)]
        first, *others = pieces
        if not others:
            return first
        zeros = (
            None if first.zeros is None else torch.cat([piece.zeros for piece in pieces if piece.zeros is not None], 1)
        )
        words, scales = torch.cat([piece.words for piece in pieces]), torch.cat([piece.scales for piece in pieces], 1)
        return PackedWeight(words, scales, zeros, self.n, self.k, self.spec)

    def _packed_rows(self, rows: slice) -> PackedWeight:
        zeros = None if self.zeros is None else self.zeros[rows]
        sources = (self.codes[rows], self.scales[rows], zeros)
        packed = pack(sources[0], sources[1], self.spec, zeros)
        for name, was, read in zip(("codes", "scales", "zeros"), sources, unpack(packed), strict=True):
            if was is not None and (read is None or not torch.equal(was, read)):
                raise QuantizationError(f"{name} [{self.n}, {self.k}] changed on their way through tile64")
        return packed
