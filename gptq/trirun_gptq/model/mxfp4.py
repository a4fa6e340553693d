"""MXFP4, the 4-bit floats in which gpt-oss stores its experts, dequantized one expert at a time.

Thirty-two neighbours along k share a scale 2^(s − 127); an element is one of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} (E2M1). Two
lie in a byte, the first in its lower half (Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import QuantizationError
from .experts import Cut, TensorFiles

# quant_method of config.json, and the endings of the two tensors that stand for a fused one.
QUANT_METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
# Beyond it are values that bfloat16 does not hold, and 255, which is no number.
LARGEST_SCALE = 252
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of packed ones, exactly.

    Args:
        blocks: uint8 [..., k / 32, 16]. scales: uint8 [..., k / 32].

    Returns:
        bfloat16 [..., k].

    Raises:
        QuantizationError: a scale is beyond :data:`LARGEST_SCALE`.
    """
    if scales.numel() and int(scales.max()) > LARGEST_SCALE:
        raise QuantizationError(f"a scale of MXFP4 values is above 2^{LARGEST_SCALE - 127}, or no number")
    values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values[pairs.long()], exponents).flatten(-2).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices of all experts of a layer in two tensors of the files, by their names: [experts, n, k / 32, 16] and
    [experts, n, k / 32]. Rows of gate and up take turns."""

    blocks: str
    scales: str

    def read(self, files: TensorFiles, cut: Cut) -> Tensor:
        """One expert's matrix, bfloat16 [n, k]."""
        rows = slice(None) if cut.half is None else slice(cut.half, None, 2)
        return dequantize_mxfp4(*(files.tensor(name)[cut.expert][rows] for name in (self.blocks, self.scales)))

    def shape(self, files: TensorFiles, cut: Cut) -> list[int]:
        """Of what :meth:`read` returns; that of the blocks where they are not what they should be."""
        blocks, scales = list(files[self.blocks].shape), list(files[self.scales].shape)
        if len(blocks) != 4 or blocks != [*scales, GROUP // 2] or cut.expert >= blocks[0]:
            return blocks
        return [blocks[1] if cut.half is None else blocks[1] // 2, blocks[2] * GROUP]
