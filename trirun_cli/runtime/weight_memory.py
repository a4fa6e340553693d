"""Weights in memory that a processor reads fastest.

A token reads every weight once, in order, so decoding runs at the speed of memory. Pages of 4 KiB, which a mapped file
has, cost a part of that speed in address translation; here a checkpoint's tensors are read straight from its files into
2 MiB pages, without passing through a mapping, so that a process never holds them twice.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "U8": torch.uint8,
    "I8": torch.int8,
}
ALIGNMENT = 256


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
            for name, facts in _header(path).items():
                if name != "__metadata__":
                    self._where[name] = (path, _data_start(path), facts)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def nbytes(self, name: str) -> int:
        """Stored bytes of a tensor."""
        start, end = self._where[name][2]["data_offsets"]
        return end - start

    def shape(self, name: str) -> list[int]:
        """Its shape."""
        return self._where[name][2]["shape"]

    def dtype(self, name: str) -> torch.dtype:
        """Its torch dtype."""
        return DTYPES[self._where[name][2]["dtype"]]

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

    def tensor(self, name: str) -> Tensor:
        """A tensor of the checkpoint, read into this memory."""
        start = self._used
        made = self.empty(self._stored.shape(name), self._stored.dtype(name))
        self._stored.read_into(name, memoryview(self._memory)[start : start + made.nbytes])
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in this memory."""
        start, count = self._used, math.prod(shape)
        self._used += self.size(count * dtype.itemsize)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(*shape)


def _data_start(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _header(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise InputError(f"{path} is truncated or not a safetensors file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise InputError(f"{path} is not a safetensors file")
    return header
