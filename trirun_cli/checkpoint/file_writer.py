"""Writing one file so that it appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError, writing


@contextmanager
def publishing(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """The path ``OUT.partial`` to write to; it becomes ``out`` once it is on disk, and is removed after an exception.

    Raises:
        InputError: ``out`` is there and ``overwrite`` is False, is no file, or another run is writing it.
    """
    out = out.resolve()
    if out.exists() and not out.is_file():
        raise InputError(f"{out} is there and is no file")
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists", "--overwrite replaces it")
    partial = out.with_name(out.name + ".partial")
    with writing(partial):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"another run is writing {out}", "wait for it, or give another --out") from None
            try:
                yield partial
                os.fsync(lock)
                os.rename(partial, out)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        finally:
            os.close(lock)
