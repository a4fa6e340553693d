"""One safetensors file: what its header says of its tensors, checked.

The format (https://github.com/huggingface/safetensors): 8 bytes, the length of the header, little-endian; the header,
a JSON object of name to ``{"dtype", "shape", "data_offsets"}``; the data, which the tensors cover without a hole.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

# safetensors' dtypes: their names in numpy and torch, and the bytes of an element.
DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
}  # fmt: skip
# The reference reader's bound of a header's bytes. Elements of a tensor, a size of 0 counted as 1: strides are 64 bits.
_LONGEST_HEADER, _MOST_ELEMENTS = 100_000_000, 1 << 62
# Those of them that the native decoders read.
ARRAY_DTYPES = ("F16", "BF16", "F32", "I32")


class TensorFileError(Exception):
    """A directory of safetensors files that is incomplete, damaged or contradicts itself, in one clear line.

    Attributes:
        fix: what to do about it, or None.
    """

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class UnsupportedDtypeError(TensorFileError):
    """A tensor of a dtype that the requested view does not have. The file is not damaged."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and what it is.

    Attributes:
        file: the safetensors file. start: its first byte, counted from the beginning of the file. nbytes: its bytes.
        dtype: by safetensors' name ("F16", "I32", ...; see :data:`DTYPES`). shape: of the tensor.
    """

    file: Path
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file says of its tensors, checked; the data is not read.

    Raises:
        TensorFileError: the file is missing, truncated, or not safetensors.
    """
    if not path.is_file():
        raise TensorFileError(f"{path} is missing")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise TensorFileError(f"{path} is truncated or not a safetensors file")
            if length > _LONGEST_HEADER:
                raise TensorFileError(f"{path}: its header has {length} bytes, more than {_LONGEST_HEADER}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise TensorFileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _entry(path, name, facts, begin, size) for name, facts in header.items()}
    position = begin
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != position:
            raise TensorFileError(f"{path}: {name} begins at byte {stored.start}, the tensor before ends at {position}")
        position += stored.nbytes
    if position != size:
        raise TensorFileError(f"{path} has {size} bytes, its tensors end at {position}")
    return tensors


def _entry(path: Path, name: str, facts: Any, begin: int, size: int) -> StoredTensor:
    """One entry of a header: its shape and place are such, agree with each other, and lie within the file's bytes
    ``begin`` to ``size``."""
    if not isinstance(facts, dict) or not isinstance(facts.get("dtype"), str):
        raise TensorFileError(f"{path} says nothing of the dtype of {name}")
    dtype, shape, place = facts["dtype"], facts.get("shape"), facts.get("data_offsets")
    if not _counts(shape) or not _counts(place) or len(place) != 2 or place[0] > place[1]:
        raise TensorFileError(f"{path}: {name} has shape {shape!r} at {place!r}")
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise TensorFileError(f"{path}: {name} has shape {shape!r}, which no tensor has")
    start, end = place
    if begin + end > size:
        raise truncated(path, name)
    # A dtype that is not known here is never read.
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype][1]:
        raise TensorFileError(f"{path}: {name} has shape {shape} of {dtype} and {end - start} bytes")
    return StoredTensor(path, begin + start, end - start, dtype, tuple(shape))


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def truncated(path: Path, name: str) -> TensorFileError:
    """The error of a file that ends before a tensor does."""
    return TensorFileError(f"{path} is truncated: it ends inside {name}")
