"""The tensors of a model directory: one safetensors file, or shards and their index.

:class:`SafetensorsDir` is the only reader of such directories. It reads the index and every header once, checks them,
and then gives out views of one kind or another: torch tensors and :class:`~trirun_kernels.arrays.Array` objects in the
mapped files, or bytes read into memory of the caller's. torch is imported by :meth:`SafetensorsDir.tensor` alone.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..arrays import Array
from .safetensors_file import (
    ARRAY_DTYPES,
    DTYPES,
    StoredTensor,
    TensorFileError,
    UnsupportedDtypeError,
    read_header,
    truncated,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COMPARED_BYTES = 1 << 20


class SafetensorsDir:
    """The tensors of a directory by name: ``directory[name]`` is a :class:`StoredTensor`.

    The directory holds ``model.safetensors``, or shards that ``model.safetensors.index.json`` names; an index counts
    where both are there. Files are mapped on first use and stay mapped until :meth:`release`.

    Attributes:
        path: the directory.

    Raises:
        TensorFileError: there are no weights, the index is damaged, names a file outside of the directory, one that is
            missing, or a tensor that its file does not hold; a file is truncated or not safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors = dict(sorted(_read_directory(self.path).items()))
        self._maps: dict[Path, mmap.mmap] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise TensorFileError(f"{self.path}: there is no tensor {name}")
        return self._tensors[name]

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return list(self._tensors)

    @property
    def files(self) -> list[Path]:
        """The files that hold them, sorted."""
        return sorted({stored.file for stored in self._tensors.values()})

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU, in the mapped file: its bytes are read when they are touched. It may be written to; the
        file stays as it is. It starts at any byte.

        Raises:
            TensorFileError: there is none, or the file has been cut since it was opened. UnsupportedDtypeError: torch
                has no such dtype.
        """
        import torch

        stored = self[name]
        dtype = getattr(torch, DTYPES.get(stored.dtype, ("",))[0], None)
        if dtype is None:
            raise UnsupportedDtypeError(f"{stored.file}: {name} is {stored.dtype}, a dtype that torch does not have")
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=dtype)
        count = stored.nbytes // dtype.itemsize
        return torch.frombuffer(self._map(name), dtype=dtype, count=count, offset=stored.start).view(stored.shape)

    def array_dtype(self, name: str) -> str:
        """A tensor's dtype by numpy's name, for :class:`~trirun_kernels.arrays.Array`.

        Raises:
            UnsupportedDtypeError: it is none of :data:`ARRAY_DTYPES`.
        """
        dtype = self[name].dtype
        if dtype not in ARRAY_DTYPES:
            raise UnsupportedDtypeError(f"{name} is {dtype}, not one of {', '.join(ARRAY_DTYPES)}")
        return DTYPES[dtype][0]

    def mapped(self, name: str) -> Array:
        """A tensor in the mapped file, without torch; see :meth:`tensor`.

        Raises:
            TensorFileError, UnsupportedDtypeError: see :meth:`array_dtype` and :meth:`tensor`.
        """
        dtype = self.array_dtype(name)
        return Array.within(self._map(name), dtype, self[name].shape, self[name].start)

    def array(self, name: str) -> np.ndarray:
        """A tensor in memory of its own, as numpy has it; bfloat16 is widened to float32.

        Raises:
            TensorFileError, UnsupportedDtypeError: see :meth:`array_dtype` and :meth:`read_into`.
        """
        import numpy as np

        dtype = self.array_dtype(name)
        raw = np.empty(self[name].nbytes, np.uint8)
        self.read_into(name, raw.data)
        if dtype == "bfloat16":
            wide = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            wide = raw.view(dtype)
        return wide.reshape(self[name].shape)

    def floats(self, name: str) -> np.ndarray:
        """A small tensor, a norm or a bias, as float32 in memory of its own.

        Raises:
            TensorFileError, UnsupportedDtypeError: see :meth:`array_dtype` and :meth:`read_into`.
        """
        import numpy as np

        return self.array(name).astype(np.float32, copy=False)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Fill a buffer with a tensor's bytes from its byte ``offset`` on, without mapping the file.

        Raises:
            TensorFileError: the file has been cut since it was opened.
        """
        stored = self[name]
        at = stored.start + offset
        with open(stored.file, "rb", buffering=0) as file:
            while len(buffer):
                count = os.preadv(file.fileno(), [buffer], at)
                if count == 0:
                    raise truncated(stored.file, name)
                buffer, at = buffer[count:], at + count

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have one dtype, one shape and the same bytes; compared a mebibyte at a time.

        Raises:
            TensorFileError: a file has been cut since it was opened.
        """
        if (self[name].dtype, self[name].shape) != (self[other].dtype, self[other].shape):
            return False
        size = self[name].nbytes
        first, second = (bytearray(min(_COMPARED_BYTES, size)) for _ in range(2))
        for start in range(0, size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, size - start)
            self.read_into(name, memoryview(first)[:count], start)
            self.read_into(other, memoryview(second)[:count], start)
            if first[:count] != second[:count]:
                return False
        return True

    def release(self) -> None:
        """Unmap the files: what was touched of a mapped file counts as this process's memory. Tensors and arrays that
        are still in use keep theirs."""
        self._maps.clear()

    def _map(self, name: str) -> mmap.mmap:
        stored = self[name]
        if stored.file not in self._maps:
            with open(stored.file, "rb") as file:
                # Private rather than read-only: Python and torch take the address of writable buffers alone.
                self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(self._maps[stored.file]) < stored.start + stored.nbytes:
            raise truncated(stored.file, name)
        return self._maps[stored.file]


def _read_directory(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory, by its index where it has one, checked."""
    shard_of = _read_index(path / INDEX) if (path / INDEX).is_file() else None
    if shard_of is None:
        if not (path / SINGLE).is_file():
            pickle = next((file.name for file in path.glob("*.bin")), None)
            hint = f"; {pickle} is a pickle: save the model with safe_serialization=True" if pickle else ""
            raise TensorFileError(f"{path} has neither {SINGLE} nor {INDEX}{hint}")
        return read_header(path / SINGLE)
    shards = {shard: read_header(path / shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise TensorFileError(f"{path / shard} does not hold {name}, which the index says it does")
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name to file name, by the index of a sharded model."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise TensorFileError(f"{index}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{index} is not valid JSON: {error}") from error
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(file, str) for file in shard_of.values()):
        raise TensorFileError(f"{index} has no weight_map of file names")
    if outside := [file for file in shard_of.values() if Path(file).name != file or file in ("", "..")]:
        raise TensorFileError(f"{index} names {outside[0]!r}, which is no file of its directory")
    return shard_of
