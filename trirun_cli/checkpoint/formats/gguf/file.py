"""A GGUF file, or one that lies in parts: its metadata and the places of its tensors, checked; the bytes, mapped.

After the header (:mod:`.header`), from the next multiple of ``general.alignment`` on, lie the data: the tensors in the
order of the table, each from the next multiple of the alignment. Parts are files of their own, named
``NAME-00001-of-00003.gguf``; the first has the model's metadata, and each says which it is (``split.no``, from 0 on).

The reader is trirun's own. The package ``gguf`` refuses files with tensors of a type that it does not know (142, 143,
36, 134, 135), and files whose type 42 has blocks of 128; it also builds a Python object for every number of an array.

Nothing that the file says is believed before it is held against the file's size. All that can be wrong with it ends in
:class:`~trirun_cli.errors.InputError`.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....errors import InputError
from .header import Header, round_up
from .types import Q2_0_ID, Q2_0_LEGACY, TYPES, GgufType, unread_type

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the table.

    Attributes:
        name: llama.cpp's. shape: the slowest dimension first, as torch has it. type: of its blocks.
        start: its first byte, counted from the beginning of its file. nbytes: its bytes.
        part: the number of its file, from 0 on.
    """

    name: str
    shape: tuple[int, ...]
    type: GgufType
    start: int
    nbytes: int
    part: int


class GgufFile:
    """A GGUF file, mapped: ``file.metadata[key]``, ``file.tensors[name]``, ``file.raw(name)``.

    Attributes:
        path: of the file, or of the first of its parts. paths: all of them. metadata: its entries.
        tensors: name to :class:`GgufTensor`, in the file's order.

    Raises:
        InputError: the file is missing, truncated, no GGUF, contradicts itself, or has a tensor of a type that trirun
            does not read; a part of it is missing, or another than the first is named.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.paths, self._maps = [self.path], [_mapped(self.path)]
        header = Header(self._maps[0], self.path)
        self.metadata = header.metadata
        count = header.metadata.count("split.count", 0, least=0)
        self.tensors = {tensor.name: tensor for tensor in _place(header, self.path, len(self._maps[0]), 0, count)}
        for number in range(1, count):
            self._add_part(number, count)
        total = self.metadata.count("split.tensors.count", len(self.tensors))
        if len(self.tensors) != total:
            raise InputError(f"{self.path} has {len(self.tensors)} tensors in all its parts, and says {total}")

    def _add_part(self, number: int, count: int) -> None:
        named = _PART.search(self.path.name)
        if self.metadata.count("split.no", 0, least=0) or named is None or int(named[2]) != count:
            name = f"its first is named NAME-00001-of-{count:05}.gguf"
            raise InputError(f"{self.path} is one of {count} parts of a model; {name}", "name the first")
        path = self.path.with_name(f"{self.path.name[: named.start()]}-{number + 1:05}-of-{count:05}.gguf")
        self.paths.append(path)
        self._maps.append(_mapped(path))
        header = Header(self._maps[-1], path)
        if header.metadata.count("split.no", 0, least=0) != number:
            raise InputError(f"{path} is not part {number + 1} of a model, as its name says")
        for tensor in _place(header, path, len(self._maps[-1]), number, count):
            if tensor.name in self.tensors:
                raise InputError(f"{path} has the tensor {tensor.name!r} of another part")
            self.tensors[tensor.name] = tensor

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes uint8 [nbytes], read-only, in the mapped file.

        Raises:
            InputError: there is no such tensor.
        """
        if name not in self.tensors:
            raise InputError(f"{self.path}: there is no tensor {name}")
        tensor = self.tensors[name]
        return np.frombuffer(self._maps[tensor.part], np.uint8, tensor.nbytes, tensor.start)

    def rows(self, name: str, matrix: int | None = None) -> np.ndarray:
        """The same without its tail, as rows: uint8 [n, bytes of a row]; of more than two dimensions all but the last
        are rows, or those of one ``matrix`` of a tensor [matrices, n, k]."""
        tensor = self.tensors[name]
        raw = self.raw(name)[: tensor.nbytes - tensor.type.tail]
        rows = raw.reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))
        return rows if matrix is None else rows.reshape(tensor.shape[0], -1, rows.shape[1])[matrix]

    def release(self) -> None:
        """Let the pages that were read go: they count as this process's memory. Views stay valid."""
        for part in self._maps:
            part.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise InputError(f"{path} is empty") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _place(header: Header, path: Path, size: int, part: int, parts: int) -> list[GgufTensor]:
    """The tensors of one file with their types and places; of several ``parts``, one may have none. Type 42 has blocks
    of 64 or, in PrismML's first files, of 128: which, the offsets tell, and the file's size for the last tensor."""
    if not header.entries and parts < 2:
        raise InputError(f"{path} holds no tensors")
    for entry in header.entries:
        if entry.type_id not in TYPES:
            why, fix = unread_type(entry.type_id)
            raise InputError(f"{path}: {entry.name} is of {why}", fix)
    official = _walk(header, path, size, part, TYPES[Q2_0_ID])
    if all(entry.type_id != Q2_0_ID for entry in header.entries):
        legacy = official
    else:
        legacy = _walk(header, path, size, part, Q2_0_LEGACY)
    if isinstance(official, list):
        if isinstance(legacy, list) and legacy != official:
            raise InputError(f"{path}: its sizes do not tell whether its tensors of type 42 have blocks of 64 or 128")
        return official
    if isinstance(legacy, list):
        return legacy
    raise official


def _walk(header: Header, path: Path, size: int, part: int, q2_0: GgufType) -> list[GgufTensor] | InputError:
    """The tensors, where those of type 42 are ``q2_0``; what is wrong where they do not lie one behind the other."""
    placed: list[GgufTensor] = []
    end = 0
    for entry in header.entries:
        kind = q2_0 if entry.type_id == Q2_0_ID else TYPES[entry.type_id]
        if entry.shape[-1] % kind.block:
            return InputError(
                f"{path}: {entry.name} has rows of {entry.shape[-1]}, no multiple of the {kind.block} of {kind.name}"
            )
        if entry.offset != end:
            return InputError(
                f"{path}: {entry.name} begins at byte {entry.offset} of the data; after the tensors before it, it is "
                f"to begin at {end}"
            )
        tensor = GgufTensor(entry.name, entry.shape, kind, header.data + end, kind.nbytes(entry.shape), part)
        if tensor.start + tensor.nbytes > size:
            needed = tensor.start + tensor.nbytes
            return InputError(f"{path} is truncated: {entry.name} ends at byte {needed}, the file at {size}")
        placed.append(tensor)
        end = round_up(end + tensor.nbytes, header.alignment)
    if size > header.data + end:
        return InputError(f"{path} has {size} bytes; its tensors end at {header.data + end}")
    return placed
