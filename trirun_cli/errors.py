"""What can go wrong for a user, and the exit code each kind ends with."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Characters of a message: it may quote what a file holds.
LONGEST_MESSAGE = 2000
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class TrirunError(Exception):
    """One clear line for the user. ``fix``, where given, says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(printable(f"{message[:LONGEST_MESSAGE]}..." if len(message) > LONGEST_MESSAGE else message))
        self.fix = fix


class UsageError(TrirunError):
    """An option's value makes no sense, or options contradict each other."""

    exit_code = 2


class InputError(TrirunError):
    """A model, checkpoint, recipe or data file is missing, damaged or not of a kind trirun knows."""

    exit_code = 3


class MissingError(TrirunError):
    """A device or an optional dependency is not there."""

    exit_code = 4


class OutOfMemoryError(TrirunError):
    """The device or the machine has too little memory."""

    exit_code = 5


class CheckFailed(TrirunError):
    """A check that the user asked for did not hold (verify, doctor, eval --max-ratio, a benchmark's)."""

    exit_code = 6


def printable(text: str) -> str:
    """A text without what would begin a new line, or speak to the terminal: names come from files of others."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up: its exception is none of Python's usual ones, and no module has its type."""
    return type(error).__name__ == "PanicException"


def explain(error: BaseException) -> TrirunError | None:
    """The user's view of an exception that libraries raise, or None when it is a defect of trirun itself.

    The libraries are recognised by name so that nothing heavy is imported to report, say, a missing file.
    """
    if isinstance(error, TrirunError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    text = " ".join(str(error).split())
    exhausted = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if exhausted or "OutOfMemoryError" in names or "DefaultCPUAllocator: can't allocate" in text:
        return OutOfMemoryError(f"out of memory: {text}", "use a smaller batch, a shorter context, or another --device")
    if _is_full(error):
        # Of a copy, the second name is the one written.
        place = (error.filename2 or error.filename) if isinstance(error, OSError) else None
        return TrirunError(f"{place}: no space left to write" if place else "no space left to write", "free some space")
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return TrirunError(f"{error.filename or 'output'}: {error.strerror}")
    if is_panic(error):
        return InputError(f"a library gave up on what a file holds: {text}")
    if "SafetensorError" in names:
        return InputError(f"unreadable safetensors file: {text}")
    if names & {"QuantizationError", "PackError"}:
        return InputError(text)
    if "TensorFileError" in names:
        return InputError(text, getattr(error, "fix", None))
    if "NativeError" in names:
        return MissingError(text)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "trirun_").startswith("trirun_"):
        package = str(error.name).partition(".")[0]
        # After `pip install --no-deps trirun` it installs what that left out.
        return MissingError(f"this needs {package}, which is not installed", "pip install trirun")
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"text that is not UTF-8: {text}")
    if isinstance(error, OSError) and error.filename:
        return InputError(f"{error.filename}: {error.strerror}")
    return None


def _is_full(error: BaseException) -> bool:
    """Whether there was no space to write."""
    # A library written in Rust says the number alone.
    told = any(f"(os error {number})" in str(error) for number in _FULL)
    return told or (isinstance(error, OSError) and error.errno in _FULL)


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Around writing below a directory.

    Raises:
        OSError: in the place of a failed write that names no file; ``path`` is named.
    """
    try:
        yield
    except Exception as error:
        # A library written in Rust says the number alone.
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = int(told[1]) if told else getattr(error, "errno", None)
        if number is not None and not getattr(error, "filename", None):
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


@contextmanager
def as_input_error(path: object) -> Iterator[None]:
    """Around transformers reading a model directory. What it raises of a config.json or of weights that do not go
    together is of no kind in particular.

    Raises:
        InputError: in the place of any exception that :func:`explain` does not know.
    """
    try:
        yield
    except Exception as error:
        if explain(error) is not None:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(f"{path} cannot be loaded as a causal language model: {reason[:300]}") from error
