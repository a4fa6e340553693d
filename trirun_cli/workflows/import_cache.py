"""Models in foreign files, packed once into a cache, for the commands that run models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.hub import local_model
from ..errors import InputError
from ..version import __version__

if TYPE_CHECKING:
    from ..console import Console


def as_model_dir(given: Path, console: Console | None = None) -> Path:
    """The directory of a model to run: :func:`~trirun_cli.checkpoint.hub.local_model`, where a GGUF file, or a
    directory that holds one, stands for the checkpoint packed of it.

    It is packed on first use, into :func:`cache_dir`, by its place, size, time of change and trirun's version.
    Everything there may be deleted at any time.

    Args:
        console: what tells the user so; None is silent.

    Raises:
        InputError, TrirunError, QuantizationError: see :func:`local_model` and :func:`~.pack.pack`.
    """
    # Here: every command imports this module, and `trirun --help` needs no reader of files.
    from ..checkpoint.formats import gguf_file

    directory = local_model(given, console)
    file = gguf_file(directory)
    if file is None:
        return directory
    packed = cache_dir() / f"{file.stem}-{_fingerprint(file)}"
    if (packed / "config.json").is_file():
        return packed
    if console is not None:
        console.note(f"packing {file} into {packed}, once")
    from .pack import pack

    packed.parent.mkdir(parents=True, exist_ok=True)
    pack(file, packed, overwrite=True)
    return packed


def cache_dir() -> Path:
    """Where packed models are kept: ``trirun`` in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trirun"


def _fingerprint(file: Path) -> str:
    """What tells a file from another, and from itself after a change."""
    import hashlib

    try:
        facts = file.stat()
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    told = f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\0{__version__}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]
