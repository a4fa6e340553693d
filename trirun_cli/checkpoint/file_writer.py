"""Writing one file so that it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trirun_kernels.weights.durable import locked, publish_file

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
        lock = locked(partial, os.O_RDWR | os.O_CREAT)
        if lock is None:
            raise InputError(f"another run is writing {out}", "wait for it, or give another --out")
        try:
            yield partial
            publish_file(partial, out)
        except BaseException:
            # On a disk that is read-only by now it stays; the error that says so is what the user needs.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)
