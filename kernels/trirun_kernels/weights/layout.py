"""tile64: the one packed layout of every kernel, as a formula and its inverse.

Row ``n`` and column ``k`` of a padded matrix live in word ``(s, kb, 4·(4r + t) + 2c + h)``, byte ``b``, bits ``2j`` and
``2j+1``:

=========  ==========================  ===================================================
n tile     ``s = n // 64``             64 rows stream together along k
row block  ``j = n % 64 // 16``        position inside a byte
row half   ``h = n % 16 // 8``         A-fragment row g or g + 8
lane row   ``r = n % 8``               lane = 4r + t
k block    ``kb = k // 32``            one warp-wide 16-byte load
k half     ``c = k % 32 // 16``        A-fragment k or k + 16
lane col   ``t``, byte ``b``           ``k % 16 = 2t + b % 2 + 8·(b // 2)``
=========  ==========================  ===================================================

``word & (0x03030303 << 2j)`` is then the A register of ``mma.m16n8k32`` (u8) for row block j, without any other
instruction, and the same four bytes feed ``m16n8k16`` (fp16), ``wgmma`` and ``vpdpbusd``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import K_BLOCK, N_TILE


def tile_codes(codes: Tensor) -> Tensor:
    """Codes uint8 [n, k] in 0..3 (n % 64 == 0, k % 32 == 0) to tile64 words int32 [n/64, k/32, 128]."""
    n, k = codes.shape
    rows = codes.contiguous().view(n // N_TILE, 4, 16, k)  # [s, j, 8h + r, k]
    # Merging the four row blocks into bytes first leaves a quarter of the data for the expensive permutation.
    packed = rows[:, 0] | rows[:, 1] << 2 | rows[:, 2] << 4 | rows[:, 3] << 6
    parts = packed.view(n // N_TILE, 2, 8, k // K_BLOCK, 2, 2, 4, 2)  # [s, h, r, kb, c, b // 2, t, b % 2]
    words = parts.permute(0, 3, 2, 6, 4, 1, 5, 7).contiguous()  # [s, kb, r, t, c, h, b // 2, b % 2]
    return words.view(n // N_TILE, k // K_BLOCK, 512).view(torch.int32)


def untile_codes(words: Tensor) -> Tensor:
    """The inverse of :func:`tile_codes`: int32 [n/64, k/32, 128] to uint8 [n, k]."""
    tiles, blocks, _ = words.shape
    parts = words.contiguous().view(torch.uint8).view(tiles, blocks, 8, 4, 2, 2, 2, 2)
    packed = parts.permute(0, 5, 2, 1, 4, 6, 3, 7).reshape(tiles, 1, 16, blocks * K_BLOCK)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=words.device).view(1, 4, 1, 1)
    return (packed >> shifts & 3).view(tiles * N_TILE, blocks * K_BLOCK)


def n_tile_order(groups: Tensor) -> Tensor:
    """Per-group values [n, g] (scales or zeros) to the stored [g, n], each n tile of 64 reordered to 8r + 2j + h,
    so that one lane reads the values of its eight rows as one 16-byte load."""
    n, g = groups.shape
    tiles = groups.t().reshape(g, n // N_TILE, 4, 2, 8)  # [g, s, j, h, r]
    return tiles.permute(0, 1, 4, 2, 3).reshape(g, n).contiguous()


def natural_order(stored: Tensor) -> Tensor:
    """The inverse of :func:`n_tile_order`: [g, n] to [n, g]."""
    g, n = stored.shape
    tiles = stored.reshape(g, n // N_TILE, 8, 4, 2)  # [g, s, r, j, h]
    return tiles.permute(0, 1, 3, 4, 2).reshape(g, n).t().contiguous()
