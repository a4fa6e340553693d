"""Rows of local data files, jsonl or csv, with errors that name the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import InputError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".csv")


class RowError(ValueError):
    """A row is malformed. ``line`` is its number in the file; 0 means the row that is being converted."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_rows(path: Path, convert: Callable[[Row], Row], columns: tuple[str, ...] = ()) -> list[Row]:
    """Every row of a file, converted.

    Args:
        path: a .jsonl file with one object on each line, or a .csv file.
        convert: raises RowError for a row it cannot use.
        columns: names for the fields of a csv file that has no header line.

    Raises:
        InputError: the file is missing, not UTF-8 or has no rows, or a row is malformed (with its line).
    """
    with _located(path) as at:
        rows = []
        for line, row in _rows(path, columns):
            at[0] = line
            rows.append(convert(row))
        if not rows:
            raise InputError(f"{path} has no rows")
        return rows


def first_row(path: Path) -> Row:
    """The first row of a file as it stands, to tell what kind of file it is; errors as :func:`read_rows`."""
    with _located(path):
        for _, row in _rows(path, ()):
            return row
        raise InputError(f"{path} has no rows")


@contextmanager
def _located(path: Path) -> Iterator[list[int]]:
    """Turn errors inside into an InputError with file and line; the list's only item is the line being read."""
    at = [0]
    try:
        yield at
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    except RowError as error:
        raise InputError(f"{path}:{error.line or at[0]}: {error}") from error


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    return _csv_rows(path, columns) if path.suffix == ".csv" else _json_rows(path)


def text(row: Row, name: str) -> str:
    """A column that must hold text.

    Raises:
        RowError: it does not.
    """
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise RowError(f"{name!r} must be text, got {_shown(value)}")
    return value


def texts(row: Row, name: str, least: int = 2) -> list[str]:
    """A column that must hold a list of at least ``least`` texts.

    Raises:
        RowError: it does not.
    """
    value = row.get(name)
    if not isinstance(value, list) or len(value) < least or not all(isinstance(item, str) and item for item in value):
        raise RowError(f"{name!r} must be a list of at least {least} texts, got {_shown(value)}")
    return value


def index(row: Row, name: str, count: int, first: int = 0) -> int:
    """A column that must hold a number from ``first`` to ``first + count - 1``; returns it counted from 0.

    Raises:
        RowError: it does not.
    """
    value = row.get(name)
    if isinstance(value, str) and len(value) < 20 and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not first <= value < first + count:
        raise RowError(f"{name!r} must be a number from {first} to {first + count - 1}, got {_shown(value)}")
    return value - first


def after(value: str, prefix: str, name: str) -> str:
    """A text without the prefix that it must have.

    Raises:
        RowError: it does not begin with it.
    """
    if not value.startswith(prefix):
        raise RowError(f"{name!r} must begin with {prefix!r}, got {_shown(value)}")
    return value[len(prefix) :]


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                # Half a character, which Python reads from an escape and nothing else takes.
                if "\\u" in line:
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise RowError(f"not valid JSON: {error}", number) from error
            if not isinstance(row, dict):
                raise RowError(f"an object is wanted, got {_shown(row)}", number)
            yield number, row


def _csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        names = list(columns)
        line = 1
        try:
            for fields in reader:
                if not names:
                    names = fields
                elif fields:
                    if len(fields) != len(names):
                        wanted = f"{len(names)} are wanted ({', '.join(names)})"
                        raise RowError(f"{len(fields)} fields where {wanted}", line)
                    yield line, dict(zip(names, fields, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            raise RowError(f"not valid CSV: {error}", line) from error
