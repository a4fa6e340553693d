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


def pack_bitnet(weight: Quantized, name: str = "weight") -> tuple[Tensor, Tensor]:
    """The inverse of :func:`unpack_bitnet` for layers that multiply: packed uint8 [n/4, k] and the scale, fp16 [1].

    Raises:
        QuantizationError: n is no multiple of 4, the weight is not ternary, or its scales differ; the first offender is
            named with its place and values.
    """
    if weight.n % 4:
        raise QuantizationError(f"{name}: {weight.n} rows; BitNet's format packs four at a time")
    if weight.spec.zero != 1.0 or bool((weight.codes == 3).any()):
        row, column = divmod(int((weight.codes == 3).flatten().int().argmax()), weight.k)
        found = f"zero point {weight.spec.zero}" if weight.spec.zero != 1.0 else f"code 3 at [{row}, {column}]"
        raise QuantizationError(f"{name} is not ternary: {found}")
    used = (weight.codes != 1).view(weight.n, weight.scales.shape[1], -1).any(-1)
    scale = weight.scales[used][0] if bool(used.any()) else weight.scales[0, 0]
    different = used & (weight.scales != scale)
    if bool(different.any()):
        row, group = divmod(int(different.flatten().int().argmax()), different.shape[1])
        values = f"{weight.scales[row, group].item()!r}, others {scale.item()!r}"
        raise QuantizationError(f"{name}: row {row}, group {group} has scale {values}; BitNet's format has one")
    parts = weight.codes.chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6, scale.reshape(1).clone()


def online_trits(master: Tensor, name: str = "weight") -> Tensor:
    """What a layer of ``quantization_mode: online`` multiplies by: ``round(w / mean|w|) · mean|w|`` within one mean, in
    the master weights' own type and in transformers' order of operations.

    Args:
        master: the latent weights [n, k], floating point.
        name: the module, for messages.

    Raises:
        QuantizationError: the weights are packed or not finite.
    """
    if master.dim() != 2 or not master.is_floating_point() or not bool(torch.isfinite(master).all()):
        raise QuantizationError(f"{name}: latent weights are finite floats [n, k], got {master.dtype}")
    scale = 1.0 / master.float().abs().mean().clamp(min=1e-5)
    return ((master.float() * scale).round().clamp(-1, 1) / scale).to(master.dtype)
