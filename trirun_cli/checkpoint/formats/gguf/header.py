"""The header of one GGUF file: its metadata, and the table of its tensors as it stands there.

The layout, little endian: magic ``GGUF``, u32 version, u64 tensors, u64 metadata entries; the entries, each a string
key, u32 kind and value; the table, for each tensor a string name, u32 dimensions, u64 sizes (the fastest first), u32
type, u64 offset. A string is u64 length and UTF-8 bytes; an array is u32 kind of its items, u64 count and the items.

Nothing that the file says is believed before it is held against the file's size.
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
from .types import ALIGNMENT

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
class Entry:
    """A line of the table as it stands in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class Header:
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
        self.entries: list[Entry] = []
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
        self.data = round_up(self._at, self.alignment)

    def _entry(self) -> Entry:
        name = self._string("a tensor's name", _LONGEST_NAME)
        count = self._number("I", f"the dimensions of {name!r}")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise InputError(f"{self._path}: {name!r} has {count} dimensions; GGUF has 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(count))[::-1]
        if 0 in shape or math.prod(shape) > _MOST_WEIGHTS:
            raise InputError(f"{self._path}: {name!r} has shape {list(shape)}, which no tensor has")
        type_id, offset = self._number("I", f"the type of {name!r}"), self._number("Q", f"the offset of {name!r}")
        return Entry(name, shape, type_id, offset)

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


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple
