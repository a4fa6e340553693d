"""Codes and scales into the packed form and back, refusing anything that would not survive the round trip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import n_tile_order, natural_order, tile_codes, untile_codes
from .shapes import PackError, filler_code, padded, stored_shapes
from .spec import QuantSpec


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One packed [n, k] weight.

    Attributes:
        words: int32 [n_pad/64, k_pad/32, 128], the codes in tile64 (see :mod:`trirun_kernels.weights.layout`).
        scales: fp16 [k_pad/group_size, n_pad] in n-tile order; one row for group_size -1.
        zeros: fp16, shaped as scales, when ``spec.zero`` is None; otherwise None.
        n, k: the true shape, before padding.
        spec: the grid.

    Raises:
        PackError: a tensor's shape or dtype contradicts n, k and spec, one is not contiguous, or they are not on one
            device.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    spec: QuantSpec

    def __post_init__(self) -> None:
        words, scales = stored_shapes(self.n, self.k, self.spec)
        _expect("words", self.words, words, torch.int32)
        _expect("scales", self.scales, scales, torch.float16)
        if (self.zeros is None) != (self.spec.zero is not None):
            raise PackError(f"zeros must be given exactly when spec.zero is None, and spec.zero is {self.spec.zero}")
        if self.zeros is not None:
            _expect("zeros", self.zeros, scales, torch.float16)
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and tensor.device != self.words.device:
                raise PackError(f"{name} are on {tensor.device}, words on {self.words.device}")

    @classmethod
    def of_operands(
        cls, words: Tensor, scales: Tensor, zeros: Tensor | None, n: int, k: int, group_size: int, zero: float
    ) -> PackedWeight:
        """A weight as operators take it apart: ``zero`` is the grid's where there are no zeros."""
        return cls(words, scales, zeros, n, k, QuantSpec(group_size, zero if zeros is None else None))

    @property
    def nbytes(self) -> int:
        """Stored bytes of words, scales and zeros."""
        return sum(t.nbytes for t in (self.words, self.scales, self.zeros) if t is not None)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return PackedWeight(self.words.to(device), self.scales.to(device), zeros, self.n, self.k, self.spec)


def pack(codes: Tensor, scales: Tensor, spec: QuantSpec, zeros: Tensor | None = None) -> PackedWeight:
    """Pack codes and scales into tile64.

    Args:
        codes: uint8 [n, k], every value in 0..3.
        scales: [n, k/group_size] ([n, 1] for group_size -1), finite; each value must be exact in fp16.
        spec: the grid the codes belong to.
        zeros: shaped as scales, given exactly when ``spec.zero`` is None; each value must be exact in fp16.

    Raises:
        PackError: a shape, dtype or value would not survive the round trip; the first offender is named.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise PackError(f"codes must be uint8 [n, k], got {codes.dtype} {list(codes.shape)}")
    n, k = codes.shape
    words_shape, groups_shape = stored_shapes(n, k, spec)
    if codes.max() > 3:
        row, column = divmod(int(codes.flatten().argmax()), k)
        raise PackError(f"codes[{row}, {column}] = {int(codes[row, column])} is not in 0..3")
    stored = {"scales": _exact_fp16("scales", scales, (n, spec.groups(k)))}
    if zeros is not None:
        stored["zeros"] = _exact_fp16("zeros", zeros, (n, spec.groups(k)))

    n_pad, k_pad = padded(n, k)
    tiled = tile_codes(F.pad(codes, (0, k_pad - k, 0, n_pad - n), value=filler_code(spec)))
    ordered = {
        name: n_tile_order(F.pad(value, (0, groups_shape[0] - value.shape[1], 0, n_pad - n)))
        for name, value in stored.items()
    }
    assert tiled.shape == words_shape
    return PackedWeight(tiled, ordered["scales"], ordered.get("zeros"), n, k, spec)


def unpack(w: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """The exact inverse of :func:`pack`: codes uint8 [n, k], scales fp16 [n, k/group_size], zeros likewise or None."""
    groups = w.spec.groups(w.k)
    codes = untile_codes(w.words)[: w.n, : w.k]
    scales = natural_order(w.scales)[: w.n, :groups]
    zeros = None if w.zeros is None else natural_order(w.zeros)[: w.n, :groups]
    return codes, scales, zeros


def dequantize(w: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as a dense [n, k] tensor: ``s · (q − zero)`` evaluated in float32, then rounded to ``dtype``."""
    codes, scales, zeros = unpack(w)
    return dequantize_codes(codes, scales, w.spec, zeros).to(dtype)


def dequantize_rows(w: PackedWeight, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows of :func:`dequantize`, without unpacking the others: what looking up tokens in an embedding needs.

    Args:
        rows: integers [...], each below n, on the weight's device.

    Returns:
        dtype [..., k].
    """
    flat = rows.reshape(-1)
    tile, j, h, r = flat // 64, flat % 64 // 16, flat % 16 // 8, flat % 8
    # [m, K, t, c], of the words [N, K, r, t, c, h] of the layout; then [m, K, c, b // 2, t, b % 2] in natural order.
    words = w.words.view(*w.words.shape[:2], 8, 4, 2, 2)[tile, :, r, :, :, h]
    shifts = (8 * torch.arange(4, device=flat.device)).view(2, 2) + 2 * j.view(-1, 1, 1, 1, 1, 1)
    codes = (words[..., None, None] >> shifts & 3).permute(0, 1, 3, 4, 2, 5).flatten(1)[:, : w.k]
    place = tile * 64 + 8 * r + 2 * j + h
    groups = w.spec.groups(w.k)
    scales, zeros = (None if part is None else part[:groups, place].t().contiguous() for part in (w.scales, w.zeros))
    assert scales is not None
    dense = dequantize_codes(codes.contiguous(), scales, w.spec, zeros)
    return dense.view(*rows.shape, w.k).to(dtype)


def dequantize_codes(codes: Tensor, scales: Tensor, spec: QuantSpec, zeros: Tensor | None = None) -> Tensor:
    """``s · (q − zero)`` in float32 for codes [n, k] and scales [n, k/group_size], before packing."""
    n, k = codes.shape
    grouped = codes.view(n, spec.groups(k), -1).float()
    zero = zero_points(spec, zeros)
    return (scales.float().unsqueeze(-1) * (grouped - zero)).view(n, k)


def zero_points(spec: QuantSpec, zeros: Tensor | None) -> float | Tensor:
    """What is subtracted from codes [n, groups, group_size]: the grid's zero, or each group's own, float32 [n, groups,
    1]. Raises ValueError where there is neither."""
    if zeros is not None:
        return zeros.float().unsqueeze(-1)
    if spec.zero is None:
        raise ValueError("a grid without a zero point needs one for every group")
    return spec.zero


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise PackError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise PackError(f"{name} must be contiguous, got {list(shape)} with strides {list(tensor.stride())}")


def _exact_fp16(name: str, value: Tensor, shape: tuple[int, int]) -> Tensor:
    if tuple(value.shape) != shape:
        raise PackError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    half = value.to(torch.float16)
    wrong = ~(half.to(value.dtype) == value) | ~torch.isfinite(half)
    if wrong.any():
        row, group = divmod(int(wrong.flatten().int().argmax()), shape[1])
        raise PackError(f"{name}[{row}, {group}] = {value[row, group].item()!r} is not a finite fp16 value")
    return half
