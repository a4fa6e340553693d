"""Tensors of GGUF as floats: what stays 16-bit beside the packed ones, and what is to be found ternary.

Blocks beside plain F32, F16 and BF16, with d an fp16 scale; weights by their number i:

- Q8_0 (32 a block): d, 32 int8: ``d q``.
- Q4_0 (32): d, 16 bytes; ``i = 16h + m`` is nibble h (0 the low one) of byte m: ``d (q − 8)``.
- Q6_K (256): 128 bytes of low nibbles, 64 of high bits, 16 int8 scales, d. In each half of 128, with low bytes l [64]
  and high bytes h [32], ``i = 32j + m`` has q of nibble ``j / 2`` of ``l[32 (j mod 2) + m]`` and, above it, bits 2j of
  ``h[m]``: ``d · scale[i / 16] · (q − 32)``.
- Q4_K (256): d, a second fp16 number dmin, 12 bytes with eight pairs of 6 bits (scale, minimum), 128 bytes of nibbles;
  ``i = 64j + 32h + m`` is nibble h of byte ``32j + m``: ``d · scale[2j + h] · q − dmin · minimum[2j + h]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ....errors import InputError
from .blocks import read_values
from .file import GgufFile

# Rows are decoded in pieces of about this many weights.
_PIECE = 1 << 22


def read_floats(file: GgufFile, name: str, matrix: int | None = None) -> Tensor:
    """A tensor's values: F16 and BF16 as they are, F32 as fp16 where that holds it exactly and else as it is; of all
    other types the nearest fp16. A ternary or 2-bit tensor with fp16 scales is exact in fp16.

    Args:
        matrix: which one of a tensor [matrices, n, k]; None is the whole tensor.

    Raises:
        InputError: a value does not fit into fp16.
    """
    tensor = file.tensors[name]
    shape = tensor.shape if matrix is None else tensor.shape[1:]
    if tensor.type.name in _PLAIN:
        stored = file.rows(name, matrix).view(_PLAIN[tensor.type.name]).reshape(shape)
        # A copy: what the caller keeps must not be a view of the mapped file.
        values = torch.from_numpy(stored.copy())
        if tensor.type.name == "BF16":
            return values.view(torch.bfloat16)
        if tensor.type.name == "F32" and torch.equal(values.half().float(), values):
            return values.half()
        return values
    made = np.empty((np.prod(shape[:-1], dtype=np.int64), shape[-1]), np.float16)
    pieces = read_values(file, name, matrix) if tensor.type.quantized else _pieces(file, name, matrix)
    for first, piece in pieces:
        with np.errstate(over="ignore"):
            made[first : first + len(piece)] = piece
        if not np.isfinite(made[first : first + len(piece)]).all():
            raise InputError(f"{file.path}: {name} has values that fp16 does not hold, from row {first} on")
    return torch.from_numpy(made).view(shape)


def _pieces(file: GgufFile, name: str, matrix: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """First row and fp32 [rows, k] of some rows after others."""
    tensor = file.tensors[name]
    decode, rows, k = _DECODERS[tensor.type.name], file.rows(name, matrix), tensor.shape[-1]
    step = max(_PIECE // k, 1)
    for first in range(0, len(rows), step):
        piece = rows[first : first + step]
        yield first, decode(piece.reshape(-1, tensor.type.block_bytes)).reshape(len(piece), k)


def _half(raw: np.ndarray) -> np.ndarray:
    """Bytes [blocks, 2] as fp32 [blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Bytes [blocks, c] as uint8 [blocks, 2, c]: the low nibbles, the high ones."""
    return np.stack([raw & 15, raw >> 4], axis=1)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).reshape(len(blocks), 32).astype(np.float32) - 8)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(len(blocks), 16, 16).astype(np.float32) - 32
    # As llama.cpp: the product of the scales is rounded first.
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return (scales[:, :, None] * codes).reshape(len(blocks), 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(len(blocks), 8, 32)
    low = _half(blocks[:, 2:4]) * minima
    return ((_half(blocks[:, :2]) * scales)[:, :, None] * codes - low[:, :, None]).reshape(len(blocks), 256)


_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}
_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
