"""GGUF, llama.cpp's file: blocks of 2-bit and ternary weights, and the container around them.

A block holds some consecutive elements of a row and one fp16 scale ``d``:

======  ========  =====  ==============================================================  ================
type    elements  bytes  element                                                          value
======  ========  =====  ==============================================================  ================
Q2_0    64        18     ``4 j + i``: bits 2i of byte ``j`` of 16, after d                d · (q − 1)
TQ2_0   256       66     ``128 h + 32 l + m``: bits 2l of byte ``32 h + m``, before d     d · (q − 1), q < 3
TQ1_0   256       54     trit ``n`` of a byte, see :func:`_trits`, before d               d · (q − 1), q < 3
======  ========  =====  ==============================================================  ================

The file (version 3, little-endian): magic, version, counts of tensors and metadata; metadata as key, type, value;
per tensor its name, dimensions (the innermost first), type and offset; the data, every tensor on a multiple of 32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from trirun_gptq.layer.quantized import Quantized

from ....errors import InputError
from ..words import regrouped, steps, within
from .types import ALIGNMENT, Q2_0_ID, TYPES, GgufType

F32, F16, BF16, TQ1_0, TQ2_0, Q2_0 = (TYPES[number] for number in (0, 1, 30, 34, 35, Q2_0_ID))
DENSE = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
PACKED = {kind.name: kind for kind in (Q2_0, TQ2_0, TQ1_0)}
# general.file_type of a model whose linear layers are of a type.
FILE_TYPES = {"F16": 1, "TQ1_0": 36, "TQ2_0": 37, "Q2_0": 41}


def encode(weight: Quantized, kind: GgufType, name: str = "weight") -> Tensor:
    """A weight's blocks, uint8 [n, k / block · bytes].

    Raises:
        QuantizationError: a value is no multiple −1, 0, 1 (Q2_0: also 2) of its scale, or one block has several scales;
            the first offender is named with its place and values.
    """
    values = steps(weight, name)
    scales = regrouped(weight, values, kind.block, name)
    if kind is Q2_0:
        # −2..1 times s is −1..2 times −s.
        grouped = values.view(weight.n, -1, kind.block)
        sign = torch.where((grouped < -1).any(-1), -1, 1).to(torch.int8)
        values, scales = (grouped * sign.unsqueeze(-1)).view_as(values), scales * sign
    # llama.cpp writes scale 0 where a block is all zeros.
    scales = torch.where((values != 0).view(weight.n, -1, kind.block).any(-1), scales, torch.zeros_like(scales))
    within(values, -1, 2 if kind is Q2_0 else 1, name)
    blocks = (values + 1).to(torch.uint8).view(-1, kind.block)
    halves = scales.reshape(-1, 1).contiguous().view(torch.uint8)
    return _ENCODERS[kind.name](blocks, halves).view(weight.n, -1)


def _q2_0(codes: Tensor, scales: Tensor) -> Tensor:
    parts = codes.view(-1, 16, 4)
    return torch.cat([scales, _quarters(parts.unbind(-1))], 1)


def _tq2_0(codes: Tensor, scales: Tensor) -> Tensor:
    # Eight codes at a time: none of them has bits that a shift takes into its neighbour.
    parts = codes.view(-1, 2, 4, 32).view(torch.int64)
    return torch.cat([_quarters(parts.unbind(2)).view(torch.uint8).flatten(1), scales], 1)


def _tq1_0(codes: Tensor, scales: Tensor) -> Tensor:
    """Elements 0..159 in 32 bytes of five trits, 160..239 in 16, the last 16 in 4 bytes of four trits and a zero."""
    last = torch.cat([codes[:, 240:].view(-1, 4, 4), codes.new_zeros(len(codes), 1, 4)], 1)
    parts = [_trits(codes[:, :160].view(-1, 5, 32)), _trits(codes[:, 160:240].view(-1, 5, 16)), _trits(last)]
    return torch.cat([*parts, scales], 1)


def _trits(trits: Tensor) -> Tensor:
    """Five trits [blocks, 5, bytes], the first the most significant, as bytes ``⌈256 v / 243⌉`` for their number v:
    so a reader multiplies by three and takes what overflows."""
    weights = torch.tensor([81, 27, 9, 3, 1], dtype=torch.int32)
    number = (trits.int() * weights.view(1, 5, 1)).sum(1)
    return ((number * 256 + 242) // 243).to(torch.uint8)


def _quarters(parts: Iterable[Tensor]) -> Tensor:
    """Four tensors of codes in bits 0-1, 2-3, 4-5 and 6-7 of one."""
    first, second, third, fourth = parts
    return first | second << 2 | third << 4 | fourth << 6


_ENCODERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Q2_0": _q2_0, "TQ2_0": _tq2_0, "TQ1_0": _tq1_0}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file to be written: its name, shape (the innermost dimension last), type, and a function that
    makes its data: uint8 blocks, or a float tensor of the type."""

    name: str
    shape: tuple[int, ...]
    kind: GgufType
    data: Callable[[], Tensor]


def write_gguf(path: Path, metadata: dict[str, Any], tensors: list[GgufTensor]) -> None:
    """Write a GGUF file, one tensor in memory at a time.

    Args:
        path: the file. metadata: int (uint32), float (float32), bool, str, or lists of one of them (of int: int32; an
            empty one is of strings, as merges are that a tokenizer of bytes alone does not have).
        tensors: in the order of the file.
    """
    with path.open("wb") as file:
        _header(file, metadata, tensors)
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            data = tensor.data().contiguous().view(torch.uint8).flatten()
            if len(data) != tensor.kind.nbytes(tensor.shape):
                raise ValueError(f"{tensor.name}: {len(data)} bytes for {tensor.kind.name} {list(tensor.shape)}")
            file.write(data.numpy().data)
        file.write(bytes(-file.tell() % ALIGNMENT))


def _header(file: BinaryIO, metadata: dict[str, Any], tensors: list[GgufTensor]) -> None:
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        try:
            number, data = _value(value)
        except (struct.error, OverflowError):
            raise InputError(f"{key} is {value!r}, which GGUF has no number for") from None
        file.write(_text(key) + struct.pack("<I", number) + data)
    offset = 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        place = struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, tensor.kind.id, offset)
        file.write(_text(tensor.name) + place)
        offset += -(-tensor.kind.nbytes(tensor.shape) // ALIGNMENT) * ALIGNMENT


def _value(value: Any) -> tuple[int, bytes]:
    """GGUF's number of a value's type, and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _text(value)
        case [] | [str(), *_]:
            return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
        case [bool(), *_]:
            return 9, struct.pack(f"<IQ{len(value)}?", 7, len(value), *value)
        case [int(), *_]:
            return 9, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)
        case [float(), *_]:
            return 9, struct.pack(f"<IQ{len(value)}f", 6, len(value), *value)
    raise TypeError(f"{value!r} has no type in GGUF")


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data
