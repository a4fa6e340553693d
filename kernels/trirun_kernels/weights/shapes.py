"""Sizes of the packed form, without torch: tiles, padding, and the shapes that are stored."""

from __future__ import annotations

from .spec import QuantSpec

N_TILE = 64  # rows of one n tile
K_BLOCK = 32  # columns of one 512-byte block
K_PAD = 128  # k is padded to this, so that every kernel works in whole activation groups


class PackError(ValueError):
    """The data does not fit the 2-bit grid or the tile64 layout; the message names the numbers."""


def padded(n: int, k: int) -> tuple[int, int]:
    """The stored shape of an [n, k] matrix: n rounded up to 64 rows, k to 128 columns."""
    return -(-n // N_TILE) * N_TILE, -(-k // K_PAD) * K_PAD


def stored_shapes(n: int, k: int, spec: QuantSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of ``words`` and of ``scales`` (and ``zeros``) for an [n, k] weight.

    Raises:
        PackError: n or k is not positive, or k is not a multiple of the group size.
    """
    if n <= 0 or k <= 0:
        raise PackError(f"a weight of shape [{n}, {k}] cannot be packed")
    try:
        spec.groups(k)
    except ValueError as error:
        raise PackError(str(error)) from None
    n_pad, k_pad = padded(n, k)
    return (n_pad // N_TILE, k_pad // K_BLOCK, 4 * K_BLOCK), (spec.groups(k_pad), n_pad)


def filler_code(spec: QuantSpec) -> int:
    """The code of padding. It decodes to zero where the grid has one; elsewhere a zero activation meets it."""
    return int(spec.zero) if spec.zero is not None and spec.zero in (0, 1, 2, 3) else 1
