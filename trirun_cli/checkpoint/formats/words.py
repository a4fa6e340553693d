"""What the formats of 32-bit words share: sixteen 2-bit codes a word, and scales that trirun holds in fp16.

Element ``16 i + j`` of a row is bits ``2 j, 2 j + 1`` of word ``i``: the lowest bits come first. What a code stands for
is each format's own: MLX counts from 0, compressed-tensors and Humming from −2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels import PackedWeight, QuantSpec, unpack

_SHIFTS = {bits: torch.arange(0, 32, bits, dtype=torch.int32) for bits in (2, 4, 8)}
# A scale that rounding changes by more has fallen below fp16's range.
_LARGEST_ERROR = 2.0**-7


def unpack_words(words: Tensor, k: int | None = None, bits: int = 2) -> Tensor:
    """Codes uint8 [rows, k] of words int32 or uint32 [rows, ⌈k · bits / 32⌉]; k None is all of them. bits: 2, 4, 8."""
    codes = (words.contiguous().view(torch.int32).unsqueeze(-1) >> _SHIFTS[bits] & (1 << bits) - 1).to(torch.uint8)
    return codes.flatten(1)[:, :k].contiguous()


def pack_words(codes: Tensor) -> Tensor:
    """The inverse of :func:`unpack_words`: codes uint8 [rows, k] in 0..3 to words int32 [rows, ⌈k/16⌉], zero-padded."""
    padded = pad(codes, (0, -codes.shape[1] % 16)).unflatten(1, (-1, 16))
    # The highest code reaches the sign bit, so the sum is taken in 64 bits and cut.
    return (padded.to(torch.int64) << _SHIFTS[2]).sum(-1).to(torch.int32)


def fp16_scales(scales: Tensor, name: str, what: str = "scale") -> tuple[Tensor, float]:
    """Scales [n, groups] in fp16, and the largest relative error of rounding them: 0 where all are exact.

    Raises:
        QuantizationError: there is none, or one is not finite, or too large or too small for fp16; its place and value
            are named.
    """
    if not scales.numel():
        raise QuantizationError(f"{name}: has no {what}s: they are {list(scales.shape)}")
    exact = scales.double()
    half = scales.to(torch.float16)
    errors = torch.where(half.double() == exact, 0.0, (half.double() - exact).abs() / exact.abs())
    lost = ~torch.isfinite(half) | (errors > _LARGEST_ERROR)
    if lost.any():
        row, group = first(lost)
        raise QuantizationError(
            f"{name}: row {row}, group {group} has {what} {scales[row, group].item()!r}, outside fp16's range"
        )
    return half.contiguous(), float(errors.max())


def on_grid(codes: Tensor, scales: Tensor, zeros: Tensor | float, group_size: int) -> Quantized:
    """A weight ``s · (q − z)`` on the plainest of trirun's grids that holds it: one zero point for all groups where
    they agree, and a ternary weight's codes as 0, 1, 2.

    Args:
        codes: uint8 [n, k]. scales: fp16 [n, groups]. zeros: [n, groups], exact in fp16, or one number.
        group_size: columns of a scale; k itself is one scale per row.
    """
    size = -1 if group_size == codes.shape[1] else group_size
    if isinstance(zeros, Tensor):
        if bool((zeros == zeros[0, 0]).all()):
            zeros = float(zeros[0, 0])
        else:
            return Quantized(codes, scales, zeros.to(torch.float16).contiguous(), QuantSpec(size, None))
    if zeros == 2 and not bool((codes == 0).any()):
        codes, zeros = codes - 1, 1.0
    return Quantized(codes, scales, None, QuantSpec(size, zeros))


def first(where: Tensor) -> tuple[int, int]:
    """Row and column of the first True of a [rows, columns] mask that has one."""
    return divmod(int(where.flatten().int().argmax()), where.shape[1])


def unpacked(packed: PackedWeight) -> Quantized:
    """Codes and scales of a packed weight."""
    codes, scales, zeros = unpack(packed)
    return Quantized(codes.contiguous(), scales.contiguous(), zeros, packed.spec)


def zero_points(weight: Quantized) -> Tensor:
    """The zero point of every group, fp16 [n, groups]."""
    return weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, weight.spec.zero or 0.0)


def steps(weight: Quantized, name: str) -> Tensor:
    """``q − zero`` as int8 [n, k]: the multiples of its scale that a weight's values are.

    Raises:
        QuantizationError: a zero point is no whole number; its place and value are named.
    """
    zeros = zero_points(weight)
    broken = zeros != zeros.round()
    if broken.any():
        row, group = first(broken)
        raise QuantizationError(f"{name}: row {row}, group {group} has zero point {zeros[row, group].item()!r}")
    grouped = weight.codes.view(weight.n, zeros.shape[1], -1).to(torch.int8)
    return (grouped - zeros.to(torch.int8).unsqueeze(-1)).view(weight.n, weight.k)


def regrouped(weight: Quantized, values: Tensor, size: int, name: str) -> Tensor:
    """The scales fp16 [n, k/size] of a weight for groups of another size. A group of zeros takes any scale.

    Args:
        values: :func:`steps` of the weight. size: columns of a group; k must be a multiple.

    Raises:
        QuantizationError: groups with different scales fall together; the first are named.
    """
    own = weight.k if weight.spec.group_size == -1 else weight.spec.group_size
    if own % size == 0:
        return weight.scales.repeat_interleave(own // size, 1)
    if size % own:
        raise QuantizationError(f"{name}: groups of {own} columns do not fall into groups of {size}")
    used = (values != 0).view(weight.n, -1, own).any(-1).view(weight.n, -1, size // own)
    parts = weight.scales.view(weight.n, -1, size // own)
    chosen = parts.gather(-1, used.int().argmax(-1, keepdim=True))
    different = (used & (parts != chosen)).any(-1)
    if different.any():
        row, group = first(different)
        shown = ", ".join(f"{scale!r}" for scale in parts[row, group].tolist())
        columns = f"columns {group * size}..{group * size + size - 1}"
        raise QuantizationError(f"{name}: row {row}, {columns} hold scales {shown}; one for {size} columns is needed")
    return chosen.squeeze(-1)


def within(values: Tensor, low: int, high: int, name: str) -> None:
    """Refuse values outside of ``low..high``.

    Raises:
        QuantizationError: the first such is named with its place.
    """
    if values.amin() < low or values.amax() > high:
        row, column = first((values < low) | (values > high))
        raise QuantizationError(
            f"{name}: weight[{row}, {column}] is {int(values[row, column])} times its scale, not in {low}..{high}"
        )


def exactly(values: Tensor, dtypes: Sequence[torch.dtype], name: str) -> Tensor:
    """Values float32 [n, k] in the first of some dtypes that holds every one.

    Raises:
        QuantizationError: none does; the first value that the last of them changes is named with its place.
    """
    for dtype in dtypes:
        cast = values.to(dtype)
        if torch.equal(cast.float(), values):
            return cast
    row, column = first(cast.float() != values)
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise QuantizationError(f"{name}: weight[{row}, {column}] = {values[row, column].item()!r} is not exact in {kinds}")
