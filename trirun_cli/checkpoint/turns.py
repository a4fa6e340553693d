"""One run after the other, where several need the same file at once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trirun_kernels.weights.durable import locked

if TYPE_CHECKING:
    from ..console import Console

# Between two looks at whether another run has finished.
POLL_S = 0.1
# What file systems answer that have no locks: then several do the same work, and the last one's has the name.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def in_turn(lock_file: Path, work: str, console: Console | None) -> Iterator[None]:
    """Around work that one process does for all: the others wait here, then look whether anything is left to do. A
    killed run's lock is gone with it.

    Args:
        lock_file: is made, its folder too, and removed. work: what it is, for those that wait: "packing MODEL".
        console: what tells the user of a wait; None is silent.

    Raises:
        OSError: the file cannot be made.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(lock_file, work, console)
    try:
        yield
    finally:
        if lock is not None:
            # Removed while it is held: who takes the lock then looks whether its file still has the name.
            with suppress(OSError):
                lock_file.unlink()
            os.close(lock)


def _lock(lock_file: Path, work: str, console: Console | None) -> int | None:
    """A descriptor that holds the lock, once no other run does; None where the file system has no locks."""
    told = False
    while True:
        try:
            lock = locked(lock_file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        if lock is not None:
            return lock
        if console is not None and not told:
            console.note(f"waiting for another run that is {work}; Ctrl-C stops")
        told = True
        time.sleep(POLL_S)
