"""Weights in memory that a processor reads fastest.

A token reads every weight once, in order, so decoding runs at the speed of memory. Pages of 4 KiB, which a mapped file
has, cost a part of that speed in address translation; here a checkpoint's tensors are read straight from its files into
2 MiB pages, without passing through a mapping, so that a process never holds them twice. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, KeysView
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from trirun_kernels.arrays import ITEM_BYTES, Array

from ..errors import InputError
from ..models.llama_config import UnsupportedModel

# safetensors' names of the types a decoder reads.
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I32": "int32"}
ALIGNMENT = 256
# Bytes of two tensors that are compared at a time.
COMPARED_BYTES = 1 << 20


class StoredTensors:
    """Where every tensor of some safetensors files lies, for reading into memory of one's own.

    Args:
        files: safetensors files; a later one wins where two hold the same name.

    Raises:
        InputError: a file is missing, truncated, or not safetensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in files:
            base, header = _header(path)
            self._where |= {name: (path, base, facts) for name, facts in header.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def nbytes(self, name: str) -> int:
        """Stored bytes of a tensor."""
        start, end = self._where[name][2]["data_offsets"]
        return end - start

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._where[name][2]["shape"])

    def dtype(self, name: str) -> str:
        """Its dtype, by numpy's name.

        Raises:
            UnsupportedModel: one that this decoder does not read.
        """
        facts = self._where[name][2]
        if facts["dtype"] not in DTYPES:
            raise UnsupportedModel(f"{name} is {facts['dtype']}, not one of {', '.join(DTYPES)}")
        return DTYPES[facts["dtype"]]

    @property
    def names(self) -> KeysView[str]:
        """Every tensor's name."""
        return self._where.keys()

    def floats(self, name: str) -> np.ndarray:
        """A small tensor, a norm or a bias, as float32."""
        stored = np.empty(self.nbytes(name), np.uint8)
        self.read_into(name, stored.data)
        dtype = self.dtype(name)
        if dtype == "bfloat16":
            wide = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            wide = stored.view(dtype).astype(np.float32)
        return wide.reshape(self.shape(name))

    def mapped(self, name: str) -> Array:
        """A tensor in the mapped file: pages are read when they are touched.

        Raises:
            InputError: the file ends before the tensor does.
        """
        path, base, facts = self._where[name]
        start, end = facts["data_offsets"]
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < base + end:
                raise InputError(f"{path} is truncated: it ends inside {name}")
            # Private rather than read-only: Python gives out the address of writable buffers alone.
            memory = mmap.mmap(file.fileno(), base + end, access=mmap.ACCESS_COPY)
        return Array.within(memory, self.dtype(name), self.shape(name), base + start)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill a buffer with a tensor's bytes from ``offset`` on.

        Raises:
            InputError: the file ends before the tensor does.
        """
        path, base, facts = self._where[name]
        at = base + facts["data_offsets"][0] + offset
        with open(path, "rb", buffering=0) as file:
            while len(buffer):
                count = os.preadv(file.fileno(), [buffer], at)
                if count == 0:
                    raise InputError(f"{path} is truncated: it ends inside {name}")
                buffer, at = buffer[count:], at + count

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have one dtype, one shape and the same bytes.

        Raises:
            InputError: the file ends before they do.
        """
        if any(self._where[name][2][fact] != self._where[other][2][fact] for fact in ("dtype", "shape")):
            return False
        size = self.nbytes(name)
        first, second = (bytearray(min(COMPARED_BYTES, size)) for _ in range(2))
        for start in range(0, size, COMPARED_BYTES):
            count = min(COMPARED_BYTES, size - start)
            self.read_into(name, memoryview(first)[:count], start)
            self.read_into(other, memoryview(second)[:count], start)
            if first[:count] != second[:count]:
                return False
        return True


class WeightMemory:
    """One block of large pages, filled with tensors in the order they are read.

    Args:
        stored: where the tensors come from. capacity: bytes; the sum of what :meth:`size` says of each tensor.
    """

    def __init__(self, stored: StoredTensors, capacity: int) -> None:
        self._stored, self._used = stored, 0
        self._memory = mmap.mmap(-1, max(capacity, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def size(nbytes: int) -> int:
        """What a tensor of that many bytes takes."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def tensor(self, name: str) -> Array:
        """A tensor of the checkpoint, read into this memory."""
        start = self._used
        made = self.empty(self._stored.shape(name), self._stored.dtype(name))
        self._stored.read_into(name, memoryview(self._memory)[start : start + made.nbytes])
        return made

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of zeros in this memory."""
        made = Array.within(self._memory, dtype, shape, self._used)
        self._used += self.size(math.prod(shape) * ITEM_BYTES[dtype])
        return made


def _header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where a safetensors file's data begins, and what it says of each tensor, checked."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise InputError(f"{path} is truncated or not a safetensors file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    for name, facts in header.items():
        _check_entry(path, name, facts, size - 8 - length)
    return 8 + length, header


def _check_entry(path: Path, name: str, facts: Any, room: int) -> None:
    """That a tensor's shape and place are such, agree with each other, and lie within ``room`` bytes of data."""
    if not isinstance(facts, dict) or not isinstance(facts.get("dtype"), str):
        raise InputError(f"{path} says nothing of the dtype of {name}")
    shape, place = facts.get("shape"), facts.get("data_offsets")
    if not _counts(shape) or not _counts(place) or len(place) != 2:
        raise InputError(f"{path}: {name} has shape {shape!r} at {place!r}")
    start, end = place
    if end > room:
        raise InputError(f"{path} is truncated: it ends inside {name}")
    # Of other types nothing is read.
    if facts["dtype"] in DTYPES and end - start != math.prod(shape) * ITEM_BYTES[DTYPES[facts["dtype"]]]:
        raise InputError(f"{path}: {name} has shape {shape} of {facts['dtype']} and {end - start} bytes")


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
