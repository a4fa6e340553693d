"""Ternary and 2-bit blocks of GGUF tensors: bytes in, codes and scales out.

All have ``w = s · (q − 1)``, which is trirun's grid with zero 1; q is 0, 1, 2 for −s, 0, +s, and Q2_0 and TQ2_0 have
room for 3, +2s. d is a scale, fp16 unless said. Weights of a block, by their number i:

- Q2_0 (64 a block), PQ2_0 and the first Q2_0 (128): d, then bytes; i is bits ``2(i mod 4)`` of byte ``i / 4``.
- Q1_0 (128): d, then bits, the lowest first: 1 is +d, 0 is −d.
- TQ2_0 (256): 64 bytes, d; ``i = 128j + 32l + m`` is bits 2l of byte ``32j + m``.
- TQ1_0 (256), PTQ1_0 (128): bytes of trits, d. A byte b holds the five digits of v in base 3, the most significant
  first, as ``b = ceil(256 v / 243)``: digit n is ``(3 · (3ⁿ b mod 256)) >> 8``. The bytes are in stages, of 32, 16 and
  4 bytes (TQ1_0) or 16, 8 and 2 (PTQ1_0), the last of four digits a byte; in a stage of c bytes that begins at weight
  a, digit n of byte m is ``i = a + c n + m``.
- I2_S (rows of 128): 32 bytes; ``i = 32g + m`` is bits ``6 − 2g`` of byte m. One fp32 scale after all rows.
  bitnet.cpp has other orders under the same id on ARM and in special builds; nothing in a file tells. Published files
  are of x86's.
- IQ2_BN: an fp32 scale a row, then 16 bytes per 64; ``i = 16l + m`` is bits 2l of byte m.
- IQ1_BN: an fp16 scale a row, then 13 bytes per 64. ``i = 16a + 5b + c`` with b < 3 is the digit of 3^c of byte
  ``3a + b``; ``i = 16a + 15`` is the digit of 3^a of byte 12. A byte of value b is as above.

Groups as they are stored: 64, 128 (256 is two of 128 with one scale), or one scale a row. Where neighbours are equal
throughout, :func:`read_codes` makes them one: a weight with groups of 128 that lies in blocks of 64 gets its own back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels import QuantSpec

from .file import GgufFile
from .types import Q2_0_LEGACY

# Rows are decoded in pieces of about this many weights: of a code's own byte and a few more while it is made.
_PIECE = 1 << 22
# The four codes of a byte of two bits each as four bytes, the lowest first: one look-up a byte. The digits of a byte of
# trits, a table each.
_BYTES = np.arange(256, dtype=np.uint32)
_PAIRS = np.stack([_BYTES >> 2 * place & 3 for place in range(4)], axis=1).astype(np.uint8).view("<u4")[:, 0]
_DIGITS = np.stack([((_BYTES * 3**n & 255) * 3 >> 8).astype(np.uint8) for n in range(5)])


def read_codes(file: GgufFile, name: str, matrix: int | None = None) -> tuple[Quantized, float]:
    """A quantized tensor as codes and scales, exactly; an fp32 scale is rounded to fp16.

    Args:
        name: of a tensor [n, k] of a quantized type. matrix: which one of a tensor [matrices, n, k].

    Returns:
        The weight, and the largest relative error of a scale's rounding: 0 where there is none.

    Raises:
        QuantizationError: a code is not the type's, or a scale is not finite or too large or small for fp16.
    """
    n, k = file.tensors[name].shape[-2:]
    codes, scales = np.empty((n, k), np.uint8), None
    for first, piece_codes, piece_scales in _pieces(file, name, matrix):
        codes[first : first + len(piece_codes)] = piece_codes
        if scales is None:
            scales = np.empty((n, piece_scales.shape[1]), piece_scales.dtype)
        scales[first : first + len(piece_codes)] = piece_scales
    assert scales is not None
    halves, error = _to_fp16(scales, name)
    merged, group_size = _merged(halves, k // halves.shape[1])
    quantized = Quantized(torch.from_numpy(codes), torch.from_numpy(merged), None, QuantSpec(group_size, 1.0))
    return quantized, error


def read_values(file: GgufFile, name: str, matrix: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """The same tensor as fp32 [some rows, k] pieces with their first rows, for what is not to be packed."""
    for first, codes, scales in _pieces(file, name, matrix):
        groups = codes.reshape(len(codes), scales.shape[1], -1).astype(np.float32)
        yield first, (scales.astype(np.float32)[:, :, None] * (groups - 1)).reshape(codes.shape)


def _pieces(file: GgufFile, name: str, matrix: int | None) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """First row, codes uint8 [rows, k] and scales [rows, groups] of some rows after others."""
    tensor = file.tensors[name]
    decode, rows, k = _DECODERS[tensor.type.name], file.rows(name, matrix), tensor.shape[-1]
    step = max(_PIECE // k, 1)
    for first in range(0, len(rows), step):
        codes, scales = decode(rows[first : first + step], k)
        if scales is None:
            scales = np.broadcast_to(file.raw(name)[-tensor.type.tail :][:4].view("<f4"), (len(codes), 1))
        if tensor.type.name in _NO_CODE_3 and codes.max(initial=0) == 3:
            raise QuantizationError(
                f"{name} has code 3, which {tensor.type.name} has not: it is damaged or mislabelled"
            )
        yield first, codes, scales


_Decoded = tuple[np.ndarray, np.ndarray | None]


def _low_bits(rows: np.ndarray, k: int, block: int) -> _Decoded:
    blocks = rows.reshape(len(rows), k // block, -1)
    codes = _PAIRS[blocks[:, :, 2:]].view(np.uint8).reshape(len(rows), k)
    return codes, _scales(blocks[:, :, :2], "<f2")


def _q1_0(rows: np.ndarray, k: int) -> _Decoded:
    blocks = rows.reshape(len(rows), k // 128, 18)
    bits = np.unpackbits(blocks[:, :, 2:], axis=-1, bitorder="little")
    return (bits * 2).reshape(len(rows), k), _scales(blocks[:, :, :2], "<f2")


def _tq2_0(rows: np.ndarray, k: int) -> _Decoded:
    blocks = rows.reshape(len(rows), k // 256, 66)
    codes = _planes(blocks[:, :, :64].reshape(len(rows), -1, 32), (0, 2, 4, 6))
    return codes.reshape(len(rows), k), np.repeat(_scales(blocks[:, :, 64:], "<f2"), 2, axis=1)


def _trits(rows: np.ndarray, k: int, block: int) -> _Decoded:
    unit = block // 16  # 16 or 8 bytes in the second stage
    blocks = rows.reshape(len(rows), k // block, -1)
    codes = np.empty((len(rows), k // block, block), np.uint8)
    begin, at = 0, 0
    for count, digits in ((2 * unit, 5), (unit, 5), (unit // 4, 4)):
        stage = blocks[:, :, begin : begin + count]
        for digit in range(digits):
            codes[:, :, at : at + count] = _DIGITS[digit][stage]
            at += count
        begin += count
    scales = _scales(blocks[:, :, begin:], "<f2")
    return codes.reshape(len(rows), k), np.repeat(scales, block // 128, axis=1)


def _i2_s(rows: np.ndarray, k: int) -> _Decoded:
    return _planes(rows.reshape(len(rows), -1, 32), (6, 4, 2, 0)).reshape(len(rows), k), None


def _iq2_bn(rows: np.ndarray, k: int) -> _Decoded:
    codes = _planes(rows[:, 4:].reshape(len(rows), -1, 16), (0, 2, 4, 6))
    return codes.reshape(len(rows), k), _scales(rows[:, :4], "<f4")


def _iq1_bn(rows: np.ndarray, k: int) -> _Decoded:
    blocks = rows[:, 2:].reshape(len(rows), k // 64, 13)
    codes = np.empty((len(rows), k // 64, 4, 16), np.uint8)
    triples = blocks[:, :, :12].reshape(len(rows), k // 64, 4, 3)
    for place in range(5):
        # The digit of 3^place is the one that comes (4 − place)-th in the order of significance.
        codes[..., place:15:5] = _DIGITS[4 - place][triples]
    for sixteenth in range(4):
        codes[:, :, sixteenth, 15] = _DIGITS[4 - sixteenth][blocks[:, :, 12]]
    return codes.reshape(len(rows), k), _scales(rows[:, :2], "<f2")


def _planes(groups: np.ndarray, shifts: tuple[int, ...]) -> np.ndarray:
    """Bits of bytes [rows, blocks, c] as [rows, blocks, 4, c], one plane for each shift."""
    codes = np.empty((*groups.shape[:2], 4, groups.shape[2]), np.uint8)
    for plane, shift in enumerate(shifts):
        np.bitwise_and(groups >> shift, 3, out=codes[:, :, plane])
    return codes


def _scales(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes [..., bytes of a scale] as [...], or [n, 1] where a row has one."""
    return np.ascontiguousarray(raw).view(dtype).reshape(len(raw), -1)


def _merged(scales: np.ndarray, group_size: int) -> tuple[np.ndarray, int]:
    """Scales [n, groups] and their group size, in the largest groups that hold the same: -1 is one scale a row."""
    bits = scales.view(np.uint16)
    if (bits == bits[:, :1]).all():
        return np.ascontiguousarray(scales[:, :1]), -1
    if group_size == 64 and scales.shape[1] % 2 == 0 and (bits[:, ::2] == bits[:, 1::2]).all():
        return np.ascontiguousarray(scales[:, ::2]), 128
    return scales, group_size


def _to_fp16(scales: np.ndarray, name: str) -> tuple[np.ndarray, float]:
    """Scales as fp16, and the largest relative error. What is subnormal in fp16 is taken only where it is exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = scales.astype(np.float16)
        wide = scales.astype(np.float64)
        lost = ~np.isfinite(halves) | ((np.abs(wide) < 2.0**-14) & (halves != wide))
    if lost.any():
        row, group = (int(index[0]) for index in np.nonzero(lost))
        scale = float(wide[row, group])
        raise QuantizationError(f"{name}: row {row}, group {group} has the scale {scale!r}, outside of fp16")
    used = wide != 0
    return halves, float((np.abs(halves[used] - wide[used]) / np.abs(wide[used])).max(initial=0.0))


_DECODERS: dict[str, Callable[[np.ndarray, int], _Decoded]] = {
    "Q2_0": partial(_low_bits, block=64),
    "PQ2_0": partial(_low_bits, block=128),
    Q2_0_LEGACY.name: partial(_low_bits, block=128),
    "Q1_0": _q1_0,
    "TQ1_0": partial(_trits, block=256),
    "TQ2_0": _tq2_0,
    "PTQ1_0": partial(_trits, block=128),
    "I2_S": _i2_s,
    "IQ1_BN": _iq1_bn,
    "IQ2_BN": _iq2_bn,
}
# Of these, two bits have room for a fourth code that no encoder writes.
_NO_CODE_3 = ("I2_S", "IQ2_BN")
