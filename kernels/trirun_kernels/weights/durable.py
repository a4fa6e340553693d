"""Publishing files and directories: what has its final name is whole and on disk, whenever the machine stops.

A file or directory is built under another name beside its own, flushed, and renamed. A rename is one step for the file
system, so its name holds the old content or the new one. The directory that holds the names is flushed last.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2  # fcntl.h, linux/fs.h
# What kernels and file systems answer that cannot exchange two names, or cannot flush a directory.
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on disk.

    Raises:
        OSError: with the path; among others where a write that was reported as done has failed since.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if path.is_dir() and error.errno in _UNKNOWN:
            return
        raise OSError(error.errno, error.strerror, str(path)) from None


def publish_file(partial: Path, out: Path) -> None:
    """Give a complete file its final name, in the place of a file that may have it.

    Raises:
        OSError: ``out`` is as it was, unless only flushing its directory has failed.
    """
    flush(partial)
    os.replace(partial, out)
    flush(out.parent)


def publish_directory(partial: Path, out: Path) -> None:
    """Give a complete directory its final name, in the place of a directory that may have it, which is removed.

    Where the file system cannot exchange two names, there is a moment in which the old directory is called
    ``OUT.replaced`` and nothing is called ``out``: :func:`recover` then gives it its name back.

    Raises:
        OSError: a rename failed; what was at ``out`` is there again.
    """
    for file in partial.rglob("*"):
        flush(file)
    flush(partial)
    recover(out)
    if not out.exists():
        os.rename(partial, out)
        flush(out.parent)
        return
    old = replaced(out)
    # Held to the end: by the name of ``partial`` another run would take it for what a killed run has left.
    held = locked(out, os.O_RDONLY)
    try:
        _replace(partial, out, old)
    finally:
        if held is not None:
            os.close(held)


def _replace(partial: Path, out: Path, old: Path) -> None:
    if _exchanged(partial, out):
        flush(out.parent)
        # From here on a directory called ``partial`` may be another run's.
        os.rename(partial, old)
    else:
        os.rename(out, old)
        try:
            os.rename(partial, out)
        except BaseException:
            os.rename(old, out)
            raise
        flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def replaced(out: Path) -> Path:
    """``OUT.replaced``: what a directory is called between its replacement and its removal."""
    return out.with_name(out.name + ".replaced")


def recover(out: Path) -> None:
    """After a killed run: give the directory that it was about to replace its name back, or finish removing it."""
    if not (old := replaced(out)).exists():
        return
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(old, out)


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange the names of two directories; False where that is not possible here."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # glibc before 2.28
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def locked(path: Path, flags: int) -> int | None:
    """Open and lock a file (``O_CREAT`` in ``flags``) or a directory, made where there is none, for as long as its
    descriptor stays open; None where another process holds the lock. The lock is on what has the name now, not on what
    another process has just published or removed.

    Args:
        flags: of ``os.open``.
    """
    while True:
        if not flags & os.O_CREAT:
            path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise OSError(error.errno, error.strerror, str(path)) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)
