"""The arithmetic of packed BitNet b1.58 weights (Ma et al. 2024) as Hugging Face stores them: tensors in, codes out.

A packed uint8 row i holds the logical rows ``i, i + n/4, i + 2n/4, i + 3n/4`` in bits 0-1, 2-3, 4-5, 6-7; the stored
value is the trit plus one, which is trirun's code already. One scale covers the tensor, and there are two opposite
conventions for it:

- ``linear_class: bitlinear`` (or absent): the layer divides by ``weight_scale``, so ``s = 1 / weight_scale``.
- ``linear_class: autobitlinear``: the layer multiplies by it, so ``s = weight_scale``.

Which files and settings that are is read in ``trirun_cli/checkpoint/formats/bitnet.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from trirun_kernels import QuantSpec

from ..errors import QuantizationError
from ..layer.quantized import Quantized


def unpack_bitnet(
    packed: Tensor, weight_scale: Tensor, *, divide: bool, name: str = "weight"
) -> tuple[Quantized, float]:
    """A packed bitnet weight as codes and scales; the codes are exact.

    Args:
        packed: uint8 [n/4, k].
        weight_scale: the tensor's one scale, any shape of one element.
        divide: the convention: whether layers divide by their scale.
        name: the module, for messages.

    Returns:
        The weight with one scale per row (group size -1, all equal), and the relative error of the scale's rounding to
        fp16: 0 when it is exact, as for most multiplied scales; at most 2⁻¹¹ otherwise.

    Raises:
        QuantizationError: a shape, dtype or code is off, or the scale is zero, not finite, or outside fp16's range.
    """
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        raise QuantizationError(f"{name}: packed weights are uint8 [n/4, k], got {packed.dtype} {list(packed.shape)}")
    if weight_scale.numel() != 1:
        raise QuantizationError(f"{name}: one weight_scale per tensor is expected, got {list(weight_scale.shape)}")
    codes = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)])
    if bool((codes == 3).any()):
        row, column = divmod(int((codes == 3).flatten().int().argmax()), codes.shape[1])
        raise QuantizationError(f"{name}: row {row}, column {column} has code 3, which no ternary weight has")
    stored = float(weight_scale)
    scale = 1 / stored if divide and stored else stored
    half = torch.tensor(scale, dtype=torch.float64).to(torch.float16)
    if not math.isfinite(float(half)) or abs(float(half)) < 2.0**-14:
        raise QuantizationError(
            f"{name}: weight_scale {stored!r} stands for a scale of {scale!r}, outside fp16's range"
        )
    scales = half.to(packed.device).expand(codes.shape[0], 1).contiguous()
    return Quantized(codes, scales, None, QuantSpec(-1, 1.0)), abs(float(half) - scale) / abs(scale)
