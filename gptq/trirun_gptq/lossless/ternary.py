"""Lossless detection of weights that are ternary already: ``{−s, 0, +s}`` with one scale per tensor, row or group.

Models trained ternary (TriLM, Kaushal et al. 2024, "Spectra"; BitNet b1.58, Ma et al. 2024) are often released
"unpacked": ordinary float tensors that hold ``scale · {−1, 0, 1}``. Nothing about the scales is assumed; they are read
from the data, and the result is proved equal to the source.
"""

from __future__ import annotations

import torch
from torch import Tensor
from trirun_kernels import QuantSpec

from ..errors import QuantizationError
from ..layer.quantized import Quantized

# From the coarsest scale structure to the finest: the fewest stored scales win.
GROUP_SIZES = (-1, 128, 64, 32)


def ternarize(weight: Tensor, name: str = "weight") -> Quantized:
    """The exact ternary form of a weight that is ternary already.

    Tries one scale per row (which covers one per tensor), then per 128, 64 and 32 columns, and returns the first that
    reproduces every value. ``result.dequantize(weight.dtype)`` equals ``weight`` (a source −0.0 becomes +0.0).

    Args:
        weight: [n, k], float16, bfloat16 or float32.
        name: the module's name, for messages.

    Returns:
        Codes 0, 1, 2 for −s, 0, +s; ``spec`` is ``QuantSpec(group_size, zero=1.0)`` with the group size found.

    Raises:
        QuantizationError: the weight is not ternary under any of these structures, or a scale is not exact in fp16.
            The message names the worst row and group and its distinct magnitudes.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        found = f"{weight.dtype} {list(weight.shape)}"
        raise QuantizationError(f"{name}: a [n, k] floating-point weight is needed, got {found}")
    if not torch.isfinite(weight).all():
        row, column = _first(~torch.isfinite(weight))
        raise QuantizationError(f"{name}: weight[{row}, {column}] = {weight[row, column].item()} is not finite")
    n, k = weight.shape
    usable = [size for size in GROUP_SIZES if size == -1 or k % size == 0]
    for size in usable:
        groups = weight.view(n, -1, k if size == -1 else size)
        magnitude = groups.abs()
        scales = magnitude.amax(-1)
        if not ((magnitude == 0) | (magnitude == scales.unsqueeze(-1))).all():
            continue
        # A group of zeros takes the tensor's scale, so that one scale per tensor stays recognisable.
        scales = torch.where(scales == 0, scales.amax(), scales)
        _require_fp16(scales, name)
        codes = (groups.sign() + 1).to(torch.uint8).view(n, k)
        quantized = Quantized(codes, scales.to(torch.float16), None, QuantSpec(size, 1.0))
        if not torch.equal(quantized.dequantize(weight.dtype), weight):
            row, column = _first(quantized.dequantize(weight.dtype) != weight)
            raise QuantizationError(f"{name}: weight[{row}, {column}] = {weight[row, column].item()} is not reproduced")
        return quantized
    raise QuantizationError(_worst_offender(weight, usable[-1], name))


def scale_structure(quantized: Quantized) -> str:
    """What one scale covers: ``"tensor"``, ``"row"``, or ``"128"``, ``"64"``, ``"32"`` columns."""
    if quantized.spec.group_size != -1:
        return str(quantized.spec.group_size)
    return "tensor" if bool((quantized.scales == quantized.scales[0, 0]).all()) else "row"


def _require_fp16(scales: Tensor, name: str) -> None:
    inexact = scales.to(torch.float16).to(scales.dtype) != scales
    if inexact.any():
        row, group = _first(inexact)
        raise QuantizationError(
            f"{name}: row {row}, group {group} has scale {scales[row, group].item()!r}, which fp16 cannot hold exactly"
        )


def _worst_offender(weight: Tensor, size: int, name: str) -> str:
    """Why a weight is not ternary, by the group (of the finest structure tried) with the most distinct magnitudes."""
    n, k = weight.shape
    magnitude = weight.abs().view(n, -1, k if size == -1 else size).sort(-1).values
    changes = (magnitude[..., 1:] != magnitude[..., :-1]).sum(-1)
    # Zero is free; every further magnitude needs its own scale.
    distinct = changes + (magnitude[..., 0] != 0)
    row, group = divmod(int(distinct.flatten().argmax()), distinct.shape[1])
    values = magnitude[row, group].unique()
    values = values[values != 0]
    shown = ", ".join(f"{value:.6g}" for value in values[:4].tolist())
    more = f", … ({len(values)} in all)" if len(values) > 4 else ""
    bad = int((distinct > 1).sum())
    columns = f"columns {group * size}..{group * size + size - 1}" if size != -1 else "all columns"
    return (
        f"{name} [{n}, {k}] is not ternary: {bad} of {distinct.numel()} groups hold more than one magnitude; "
        f"the worst is row {row}, group {group} ({columns}) with |w| in {{{shown}{more}}}"
    )


def _first(where: Tensor) -> tuple[int, int]:
    return divmod(int(where.flatten().int().argmax()), where.shape[1])
