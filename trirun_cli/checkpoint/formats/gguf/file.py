"""One GGUF file: its metadata and the places of its tensors, checked; the tensors' bytes, mapped.

The layout, little endian: magic ``GGUF``, u32 version, u64 tensors, u64 metadata entries; the entries, each a string
key, u32 kind and value; the table, for each tensor a string name, u32 dimensions, u64 sizes (the fastest first), u32
type, u64 offset; then, from the next multiple of ``general.alignment`` on, the data: the tensors in the order of the
table, each from the next multiple of the alignment. A string is u64 length and UTF-8 bytes; an array is u32 kind of its
items, u64 count and the items.

The reader is trirun's own. The package ``gguf`` refuses files with tensors of a type that it does not know (142, 143,
36, 134, 135), and files whose type 42 has blocks of 128; it also builds a Python object for every number of an array.

Nothing that the file says is believed before it is held against the file's size. All that can be wrong with it ends in
:class:`~trirun_cli.errors.InputError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ....errors import InputError
from .metadata import Metadata
from .types import ALIGNMENT, Q2_0_ID, Q2_0_LEGACY, TYPES, GgufType, unread_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Kinds of metadata values: struct's letters and numpy's dtypes.
_NUMBERS = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"), 5: ("i", "<i4"),
    6: ("f", "<f4"), 7: ("?", "?"), 10: ("Q", "<u8"), 11: ("q", "<i8"), 12: ("d", "<f8"),
}  # fmt: skip
_LONGEST_KEY, _LONGEST_NAME, _MOST_DIMENSIONS, _LARGEST_ALIGNMENT = 65535, 64, 4, 1 << 20
_MOST_WEIGHTS = 1 << 48
# The fewest bytes of an entry: a key of one letter and a byte; a name of one letter, one dimension, type and offset.
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the table.

    Attributes:
        name: llama.cpp's. shape: the slowest dimension first, as torch has it. type: of its blocks.
        start: its first byte, counted from the beginning of the file. nbytes: its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GgufType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the table as it stands in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufFile:
    """A GGUF file, mapped: ``file.metadata[key]``, ``file.tensors[name]``, ``file.raw(name)``.

    Attributes:
        path: of the file. metadata: its entries.
        tensors: name to :class:`GgufTensor`, in the file's order.

    Raises:
        InputError: the file is missing, truncated, no GGUF, contradicts itself, or has a tensor of a type that trirun
            does not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise InputError(f"{self.path} is empty") from None
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}") from error
        header = _Header(self._map, self.path)
        self.metadata = header.metadata
        self.tensors = {tensor.name: tensor for tensor in _place(header, self.path, len(self._map))}

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes uint8 [nbytes], read-only, in the mapped file.

        Raises:
            InputError: there is no such tensor.
        """
        if name not in self.tensors:
            raise InputError(f"{self.path}: there is no tensor {name}")
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.start)

    def rows(self, name: str) -> np.ndarray:
        """The same without its tail, as rows: uint8 [n, bytes of a row]; of more than two dimensions all but the last
        are rows."""
        tensor = self.tensors[name]
        return self.raw(name)[: tensor.nbytes - tensor.type.tail].reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))

    def release(self) -> None:
        """Let the pages that were read go: they count as this process's memory. Views stay valid."""
        self._map.madvise(mmap.MADV_DONTNEED)


class _Header:
    """Reads metadata and table, from the file's first byte on.

    Attributes:
        metadata: see :class:`GgufFile`. entries: the table. alignment: of tensors. data: the first byte after the
            table, rounded up to it.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0
        if self._take(4, "the magic number") != MAGIC:
            raise InputError(f"{path} is not a GGUF file")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            if version and not version & 0xFFFF:
                raise InputError(f"{path} is a big-endian GGUF file; trirun reads little-endian ones")
            raise InputError(f"{path} has GGUF version {version}; versions 2 and 3 are read")
        tensors, entries = self._number("Q", "the tensor count"), self._number("Q", "the metadata count")
        self._require(tensors, _SMALLEST_TENSOR, "tensors")
        self._require(entries, _SMALLEST_ENTRY, "metadata entries")
        self.metadata = Metadata(path)
        for _ in range(entries):
            key = self._string("a metadata key", _LONGEST_KEY)
            if key in self.metadata:
                raise InputError(f"{path}: the metadata has {key!r} twice")
            self.metadata[key] = self._value(self._number("I", f"the kind of {key!r}"), key)
        self.entries: list[_Entry] = []
        names: set[str] = set()
        for _ in range(tensors):
            entry = self._entry()
            if entry.name in names:
                raise InputError(f"{path} has the tensor {entry.name!r} twice")
            names.add(entry.name)
            self.entries.append(entry)
        self.alignment = self.metadata.count("general.alignment", ALIGNMENT)
        if self.alignment > _LARGEST_ALIGNMENT or self.alignment & (self.alignment - 1):
            raise InputError(f"{path}: general.alignment is {self.alignment!r}, not a power of two up to 1 MiB")
        self.data = _round_up(self._at, self.alignment)

    def _entry(self) -> _Entry:
        name = self._string("a tensor's name", _LONGEST_NAME)
        count = self._number("I", f"the dimensions of {name!r}")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise InputError(f"{self._path}: {name!r} has {count} dimensions; GGUF has 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(count))[::-1]
        if 0 in shape or math.prod(shape) > _MOST_WEIGHTS:
            raise InputError(f"{self._path}: {name!r} has shape {list(shape)}, which no tensor has")
        type_id, offset = self._number("I", f"the type of {name!r}"), self._number("Q", f"the offset of {name!r}")
        return _Entry(name, shape, type_id, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind != _ARRAY:
            return self._number(self._letters(kind, key)[0], f"the value of {key!r}")
        item, count = self._number("I", f"the kind of {key!r}"), self._number("Q", f"the count of {key!r}")
        if item == _STRING:
            self._require(count, 8, f"strings of {key!r}")
            return [self._string(f"string {index} of {key!r}") for index in range(count)]
        dtype = np.dtype(self._letters(item, key)[1])
        self._require(count, dtype.itemsize, f"items of {key!r}")
        return np.frombuffer(self._take(count * dtype.itemsize, f"the items of {key!r}"), dtype)

    def _letters(self, kind: int, key: str) -> tuple[str, str]:
        if kind not in _NUMBERS:
            raise InputError(f"{self._path}: {key!r} has values of the unknown kind {kind}")
        return _NUMBERS[kind]

    def _string(self, what: str, longest: int | None = None) -> str:
        length = self._number("Q", what)
        if longest is not None and not 1 <= length <= longest:
            raise InputError(f"{self._path}: {what} has {length} bytes, not 1 to {longest}")
        raw = self._take(length, what)
        try:
            # Names must be what they are; of a description, a broken letter may be lost.
            return raw.decode("utf-8", "replace" if longest is None else "strict")
        except UnicodeDecodeError:
            raise InputError(f"{self._path}: {what} is not UTF-8: {raw[:80]!r}") from None

    def _number(self, letter: str, what: str) -> Any:
        form = "<" + letter
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        if count > len(self._data) - self._at:
            self._truncated(f"it ends at byte {len(self._data)}, inside {what} ({count} bytes at {self._at})")
        self._at += count
        return self._data[self._at - count : self._at]

    def _require(self, count: int, each: int, what: str) -> None:
        """That so many things can be there at all, before any is read."""
        if count * each > len(self._data) - self._at:
            self._truncated(f"it says it has {count} {what}, and has {len(self._data)} bytes")

    def _truncated(self, message: str) -> NoReturn:
        raise InputError(f"{self._path} is truncated or not a GGUF file: {message}")


def _place(header: _Header, path: Path, size: int) -> list[GgufTensor]:
    """The tensors with their types and places. Type 42 has blocks of 64 or, in PrismML's first files, of 128: which,
    the offsets tell, and the file's size for the last tensor."""
    if not header.entries:
        raise InputError(f"{path} holds no tensors")
    for entry in header.entries:
        if entry.type_id not in TYPES:
            why, fix = unread_type(entry.type_id)
            raise InputError(f"{path}: {entry.name} is of {why}", fix)
    official = _walk(header, path, size, TYPES[Q2_0_ID])
    if all(entry.type_id != Q2_0_ID for entry in header.entries):
        legacy = official
    else:
        legacy = _walk(header, path, size, Q2_0_LEGACY)
    if isinstance(official, list):
        if isinstance(legacy, list) and legacy != official:
            raise InputError(f"{path}: its sizes do not tell whether its tensors of type 42 have blocks of 64 or 128")
        return official
    if isinstance(legacy, list):
        return legacy
    raise official


def _walk(header: _Header, path: Path, size: int, q2_0: GgufType) -> list[GgufTensor] | InputError:
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
        tensor = GgufTensor(entry.name, entry.shape, kind, header.data + end, kind.nbytes(entry.shape))
        if tensor.start + tensor.nbytes > size:
            needed = tensor.start + tensor.nbytes
            return InputError(f"{path} is truncated: {entry.name} ends at byte {needed}, the file at {size}")
        placed.append(tensor)
        end = _round_up(end + tensor.nbytes, header.alignment)
    if size > header.data + end:
        return InputError(f"{path} has {size} bytes; its tensors end at {header.data + end}")
    return placed


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
