"""Packed weights read back with numpy, for programs without torch: what :mod:`.layout` and :mod:`.packing` do there,
and hold this to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .shapes import K_BLOCK, N_TILE, filler_code, padded
from .spec import QuantSpec


class Codes(NamedTuple):
    """An unpacked weight with its padding.

    Attributes:
        codes: uint8 [n_pad, k_pad]. scales: float16 [n_pad, groups of k_pad]. zeros: likewise, or None.
        n, k: the true shape. spec: the grid.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    n: int
    k: int
    spec: QuantSpec

    @property
    def true_codes(self) -> np.ndarray:
        """Without padding: uint8 [n, k]."""
        return self.codes[: self.n, : self.k]

    def true_groups(self, stored: np.ndarray) -> np.ndarray:
        """Scales or zeros without padding: float16 [n, k/group_size]."""
        return stored[: self.n, : self.spec.groups(self.k)]

    @property
    def is_canonical(self) -> bool:
        """Whether packing these codes and scales again gives the same words and scales: codes and scales have one
        place each, so that only padding can differ."""
        n, k, groups = self.n, self.k, self.spec.groups(self.k)
        filler = filler_code(self.spec)
        padding = (self.codes[n:] == filler, self.codes[:n, k:] == filler)
        return all(part.all() for part in padding) and not self.scales[n:].any() and not self.scales[:n, groups:].any()

    def dense(self) -> np.ndarray:
        """``s · (q − zero)``, float32 [n, k]."""
        groups = self.spec.groups(self.k)
        q = self.true_codes.astype(np.float32).reshape(self.n, groups, -1)
        scales = self.true_groups(self.scales).astype(np.float32)[:, :, None]
        q -= (
            self.spec.zero_operand
            if self.zeros is None
            else self.true_groups(self.zeros).astype(np.float32)[:, :, None]
        )
        q *= scales
        return q.reshape(self.n, self.k)


def unpack(words: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, n: int, k: int, spec: QuantSpec) -> Codes:
    """A weight as :class:`~.packing.PackedWeight` stores it: words int32 [n_pad/64, k_pad/32, 128], scales (and zeros)
    float16 [k_pad/group_size, n_pad]."""
    assert padded(n, k) == (words.shape[0] * N_TILE, words.shape[1] * K_BLOCK)
    ordered = None if zeros is None else natural_order(zeros)
    return Codes(untile_codes(words), natural_order(scales), ordered, n, k, spec)


def untile_codes(words: np.ndarray) -> np.ndarray:
    """:func:`.layout.untile_codes`: int32 [n/64, k/32, 128] to uint8 [n, k]."""
    tiles, blocks, _ = words.shape
    # [s, kb, r, t, c, h, b // 2, b % 2] to [s, h, r, kb, c, b // 2, t, b % 2]
    parts = words.view(np.uint8).reshape(tiles, blocks, 8, 4, 2, 2, 2, 2)
    packed = parts.transpose(0, 5, 2, 1, 4, 6, 3, 7).reshape(tiles, 16, blocks * K_BLOCK)
    codes = np.empty((tiles, 4, 16, blocks * K_BLOCK), np.uint8)
    for j in range(4):
        np.bitwise_and(packed >> (2 * j), 3, out=codes[:, j])
    return codes.reshape(tiles * N_TILE, blocks * K_BLOCK)


def natural_order(stored: np.ndarray) -> np.ndarray:
    """:func:`.layout.natural_order`: [g, n] to [n, g]."""
    g, n = stored.shape
    return np.ascontiguousarray(stored.reshape(g, n // N_TILE, 8, 4, 2).transpose(1, 3, 4, 2, 0)).reshape(n, g)
