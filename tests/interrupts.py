"""Ctrl-C in tests: what SIGINT does in this process and in those it starts, whatever this process inherited."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigint_handled_by(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """SIGINT with this handler inside the block: by default as a program in the foreground has it.

    A shell starts its background commands with SIGINT ignored, and a process hands that on to its children. A test that
    sends Ctrl-C sets the handler first, here or around the start of the child: a child inherits ``signal.SIG_IGN``, and
    gets the system's default for any other handler.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
