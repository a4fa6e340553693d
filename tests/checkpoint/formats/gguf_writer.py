"""Small GGUF files for tests: a writer, and the ternary encoders that make them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

F32, F16, Q2_0, PQ2_0 = 0, 1, 42, 142
DATA = Path(__file__).parent / "data"


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """A metadata value with its kind before it."""
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case np.ndarray():
            kind = {"f": 6, "i": 5, "u": 4}[item.dtype.kind]
            raw = item.astype({6: "<f4", 5: "<i4", 4: "<u4"}[kind]).tobytes()
            return struct.pack("<IIQ", 9, kind, len(item)) + raw
        case list():
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
    raise TypeError(type(item))


def header(metadata: dict, table: list[tuple[str, tuple[int, ...], int, int]], version: int = 3) -> bytes:
    """Everything before the data; the table is of (name, shape, type, offset)."""
    made = [struct.pack("<4sIQQ", b"GGUF", version, len(table), len(metadata))]
    made += [string(key) + value(item) for key, item in metadata.items()]
    for name, shape, kind, offset in table:
        made.append(string(name) + struct.pack("<I", len(shape)))
        made.append(struct.pack(f"<{len(shape)}QIQ", *reversed(shape), kind, offset))
    return b"".join(made)


def padded(raw: bytes, alignment: int = 32) -> bytes:
    return raw + b"\0" * (-len(raw) % alignment)


def write_gguf(path: Path, metadata: dict, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """A file of metadata and tensors, name to (type, shape, bytes)."""
    table, data = [], b""
    for name, (kind, shape, raw) in tensors.items():
        table.append((name, shape, kind, len(data)))
        data += padded(raw)
    path.write_bytes(padded(header(metadata, table)) + data)
    return path


def write_parts(folder: Path, metadata: dict, tensors: dict, count: int) -> list[Path]:
    """The same in so many files, the tensors in turn; as llama-gguf-split names and marks them."""
    made = []
    for number in range(count):
        part = dict(list(tensors.items())[number::count])
        marks = {"split.no": number, "split.count": count, "split.tensors.count": np.int32(len(tensors)).item()}
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        made.append(write_gguf(path, (metadata if number == 0 else {}) | marks, part))
    return made


def one_tensor(path: Path, kind: int, shape: tuple[int, ...], raw: bytes) -> Path:
    return write_gguf(path, {}, {"x": (kind, shape, raw)})


def fp16(values: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    return F16, values.shape, values.astype("<f2").tobytes()


def fp32(values: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    return F32, values.shape, values.astype("<f4").tobytes()


def two_bits(weight: np.ndarray, group_size: int, kind: int | None = None) -> tuple[int, tuple[int, ...], bytes]:
    """Q2_0 (64) or PQ2_0 (128) of a weight that is ternary in such groups; ``kind``: under another id."""
    groups = weight.reshape(-1, group_size)
    scales = np.abs(groups).max(1).astype("<f2")
    codes = (np.sign(groups) + 1).astype(np.uint8).reshape(-1, group_size // 4, 4)
    raw = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)
    blocks = np.concatenate([scales.reshape(-1, 1).view(np.uint8), raw], axis=1)
    return kind or {64: Q2_0, 128: PQ2_0}[group_size], weight.shape, blocks.tobytes()
