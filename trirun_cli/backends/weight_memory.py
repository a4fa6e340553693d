"""Weights in memory that a processor reads fastest.

A token reads every weight once, in order, so decoding runs at the speed of memory. Pages of 4 KiB, which a mapped file
has, cost a part of that speed in address translation; here a checkpoint's tensors are read straight from its files into
2 MiB pages, without passing through a mapping, so that a process never holds them twice. Nothing here imports torch.
"""

from __future__ import annotations

import math
import mmap

from trirun_kernels.arrays import ITEM_BYTES, Array
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

ALIGNMENT = 256


class WeightMemory:
    """One block of large pages, filled with tensors in the order they are read.

    Args:
        tensors: where they come from. capacity: bytes; the sum of what :meth:`size` says of each tensor.
    """

    def __init__(self, tensors: SafetensorsDir, capacity: int) -> None:
        self._tensors, self._used = tensors, 0
        self._memory = mmap.mmap(-1, max(capacity, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def size(nbytes: int) -> int:
        """The bytes that a tensor of ``nbytes`` takes, with its alignment."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def tensor(self, name: str) -> Array:
        """A tensor of the checkpoint, read into this memory.

        Raises:
            TensorFileError: the file ends before the tensor does. UnsupportedDtypeError: native code does not read it.
        """
        start = self._used
        made = self.empty(self._tensors[name].shape, self._tensors.array_dtype(name))
        self._tensors.read_into(name, memoryview(self._memory)[start : start + made.nbytes])
        return made

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of zeros in this memory, ``dtype`` by numpy's name."""
        made = Array.within(self._memory, dtype, shape, self._used)
        self._used += self.size(math.prod(shape) * ITEM_BYTES[dtype])
        return made
