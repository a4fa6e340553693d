"""bfloat16 weights in 12 bits each, without loss, as csrc/cuda/head/head_12bit.cu reads them.

The exponents of a row's weights lie close together, so four bits say how far one is above the row's base; the few
weights below it are kept apart. That exponents of trained models carry little information is from Zhang et al., "70%
Size, 100% Accuracy: Lossless LLM Compression via Dynamic-Length Float" (NeurIPS 2025), whose code has variable length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS, BLOCK = 8, 64  # rows and columns that lie together
EXPONENTS = 16  # that a weight can have
RECORD_WORDS = 32
MOST_APART = 29  # weights of eight rows, for which a record has room
LARGEST_BASE = 191  # of an exponent as stored: beyond, a row's factor would be none of float32
RAISED_LOG = 64  # of x, as csrc/cuda/head/head_12bit.cu multiplies it
# Rows that are packed at a time: 32 MiB of each of a dozen tensors where rows have 4096 columns.
PIECE = 2048
# Sign and mantissa of a bfloat16.
REST = 0x807F


@dataclass(frozen=True, slots=True)
class TwelveBits:
    """A weight [n, k] of bfloat16 numbers, k at most 8192.

    Attributes:
        blocks: int32 [n / 8, k / 64, 192]: of eight rows and 64 columns, in the order of lanes 4·row + t, which have
            columns 16t to 16t + 15: four words each of signs and mantissas, then two each of exponents.
        records: int32 [n / 8, 32]: in bytes each row's factor as an exponent of float32; how many weights are kept
            apart; and a word each of these: value, row (3 bits), column (13 bits).
        counter: int32 [1], zero between products, which count in it: there can be one at a time.
    """

    blocks: Tensor
    records: Tensor
    counter: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> TwelveBits | None:
        """A weight [n, k] of floats, n in multiples of 8 and k of 64; None where its numbers are none of bfloat16, or
        too many of them are far below the largest of their row."""
        pieces = []
        for rows in weight.split(PIECE):
            piece = _packed(rows)
            if piece is None:
                return None
            pieces.append(piece)
        blocks, records = zip(*pieces, strict=True)
        return cls(torch.cat(blocks), torch.cat(records), torch.zeros(1, dtype=torch.int32, device=weight.device))

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.blocks.nbytes + self.records.nbytes

    def dequantize(self) -> Tensor:
        """The weight, bfloat16 [n, k]."""
        groups, columns, _ = self.blocks.shape
        words, exponents = self.blocks.split((128, 64), 2)
        words, exponents = words.unflatten(2, (8, 4, 4)), exponents.unflatten(2, (8, 4, 2))
        rest = torch.stack([words, _rotated(words, 8)], -1) & (REST << 16 | REST)
        field = torch.stack([_rotated(exponents, by) for by in (0, 28, 4, 24)], -1) >> 7 & 0xF000F
        halves = torch.stack([rest.flatten(-2), field.flatten(-2)], -1)  # two columns in each
        halves = torch.stack([halves & 0xFFFF, halves >> 16 & 0xFFFF], -2).flatten(-3, -2)
        rest, field = halves.permute(5, 0, 2, 1, 3, 4).reshape(2, groups * ROWS, columns * BLOCK)
        base = self.records[:, :2].contiguous().view(torch.uint8).view(-1, 1).int() - (127 - RAISED_LOG)
        bits = rest | torch.where(field > 0, field + base, 0) << 7
        for group, count in enumerate(self.records[:, 2].tolist()):
            place = self.records[group, 3 : 3 + count]
            bits[group * ROWS + (place >> 13 & 7), place & 8191] = place >> 16 & 0xFFFF
        return bits.to(torch.int16).view(torch.bfloat16)


def _packed(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    n, k = weight.shape
    narrow = weight.to(torch.bfloat16)
    if not torch.equal(narrow.to(weight.dtype), weight):
        return None
    bits = narrow.view(torch.int16).int() & 0xFFFF
    field = bits >> 7 & 255
    base = (field.amax(1, keepdim=True) - (EXPONENTS - 1)).clamp_(min=0)
    exponent = field - base
    below = exponent < 1
    apart = below & ((bits & 0x7FFF) != 0)
    counts = apart.view(n // ROWS, -1).sum(1, dtype=torch.int32)
    if base.max() > LARGEST_BASE or counts.max() > MOST_APART:
        return None

    def of_lanes(v: Tensor) -> Tensor:
        lanes = v.view(n // ROWS, ROWS, k // BLOCK, 4, 8, 2).transpose(1, 2)
        return lanes[..., 0] | lanes[..., 1] << 16  # neighbours are the halves of a word

    rest, pairs = of_lanes((bits & REST).masked_fill(apart, 0)), of_lanes(exponent.masked_fill(below, 0))
    rest, pairs = rest.unflatten(-1, (4, 2)), pairs.unflatten(-1, (2, 4)) << 7
    words = rest[..., 0] | _rotated(rest[..., 1], 24)
    exponents = pairs[..., 0] | _rotated(pairs[..., 1], 4) | _rotated(pairs[..., 2], 28) | _rotated(pairs[..., 3], 8)
    blocks = torch.cat([part.reshape(n // ROWS, k // BLOCK, -1) for part in (words, exponents)], 2)
    records = torch.zeros(n // ROWS, RECORD_WORDS, dtype=torch.int32, device=weight.device)
    records.view(torch.uint8)[:, :ROWS] = (base + (127 - RAISED_LOG)).view(-1, ROWS)
    records[:, 2] = counts
    group, place = apart.view(n // ROWS, -1).nonzero(as_tuple=True)
    nth = torch.arange(group.numel(), device=weight.device) - (counts.cumsum(0) - counts)[group]
    value = bits.view(n // ROWS, -1)[group, place]
    records[group, 3 + nth] = value << 16 | ((place // k) << 13 | place % k).int()
    return blocks, records


def _rotated(v: Tensor, left: int) -> Tensor:
    """32-bit words rotated."""
    return v if left == 0 else v << left | v >> (32 - left) & ((1 << left) - 1)
