"""Arrays that are only an address, a type and a shape, so that native code can be fed without importing torch."""

from __future__ import annotations

import ctypes
import math
import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# numpy's short names, of little-endian machines, which all of trirun's kernels are for.
_NUMPY_NAMES = {"<f4": "float32", "<f2": "float16", "<i8": "int64", "<i4": "int32", "|u1": "uint8"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Array:
    """Contiguous memory on the CPU.

    Attributes:
        address: of the first element. dtype: "float32", "bfloat16", ... shape: as of a tensor.
        owner: whatever keeps the memory alive.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    owner: Any

    @classmethod
    def of(cls, x: Any) -> Array:
        """A torch tensor, a numpy array, or an Array, as it lies in memory.

        Raises:
            ValueError: it is not contiguous, not on the CPU, or of another dtype.
        """
        if isinstance(x, Array):
            return x
        if hasattr(x, "data_ptr"):
            dtype, address, contiguous = str(x.dtype).removeprefix("torch."), x.data_ptr(), x.is_contiguous()
            if x.device.type != "cpu":
                raise ValueError(f"an array is on {x.device}, not on the CPU")
        else:
            # dtype.name and x.ctypes.data say the same, but take microseconds of every token.
            dtype = _NUMPY_NAMES.get(x.dtype.str) or x.dtype.name
            address, contiguous = x.__array_interface__["data"][0], x.flags.c_contiguous
        if not contiguous or dtype not in ITEM_BYTES:
            raise ValueError(f"{dtype} {list(x.shape)} is not contiguous or not one of {', '.join(ITEM_BYTES)}")
        return cls(address, dtype, tuple(x.shape), x)

    @classmethod
    def ids(cls, values: Sequence[int]) -> Array:
        """A copy of integers as int64 [n], for less than a numpy array of them."""
        memory = array("q", values)
        return cls(memory.buffer_info()[0], "int64", (len(memory),), memory)

    @classmethod
    def within(cls, memory: Any, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Array:
        """A part of a writable buffer (a private ``mmap``, a ``bytearray``) from ``offset`` bytes on.

        Raises:
            ValueError: the buffer is too short.
        """
        size = math.prod(shape) * ITEM_BYTES[dtype]
        view = (ctypes.c_char * size).from_buffer(memory, offset)
        return cls(ctypes.addressof(view), dtype, shape, view)

    @classmethod
    def anonymous(cls, size: int, advice: str) -> Array:
        """Zeroed bytes that are committed as they are written, in pages that ``mmap``'s advice of that name says."""
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
        return cls.within(memory, "uint8", (size,))

    def data_ptr(self) -> int:
        """The address, by torch's name."""
        return self.address

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, start: int, count: int) -> Array:
        """``count`` rows of the first dimension from ``start`` on, in the same memory."""
        if not 0 <= start <= start + count <= self.shape[0]:
            raise ValueError(f"rows {start} to {start + count} of {self.shape[0]}")
        row = self.nbytes // max(self.shape[0], 1)
        return Array(self.address + start * row, self.dtype, (count, *self.shape[1:]), self.owner)
