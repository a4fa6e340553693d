"""Models in foreign formats, packed once into a cache, for the commands that run models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.hub import local_model, model_name
from ..checkpoint.turns import in_turn
from ..errors import InputError
from ..version import __version__

if TYPE_CHECKING:
    from ..console import Console


def as_model_dir(given: Path, console: Console | None = None, *, verify: bool = False) -> Path:
    """The directory of a model to run: :func:`~trirun_cli.checkpoint.hub.local_model`, where a GGUF file, a directory
    that holds one, or one that another program has packed stands for the checkpoint packed of it.

    It is packed on first use, into :func:`cache_dir`, by its files, their sizes and times of change, and trirun's
    version. Everything there may be deleted at any time. Of several runs that need it at once, one packs and the others
    wait for it.

    Args:
        console: what tells the user so; None is silent.
        verify: hold its files against their checksums, see :func:`~trirun_cli.checkpoint.verify.require_whole`.

    Raises:
        InputError, TrirunError, QuantizationError: see :func:`local_model` and :func:`~.pack.pack`.
        CheckFailed: ``verify``, and a file differs.
    """
    model = _as_model_dir(given, console)
    if verify:
        from ..checkpoint.verify import require_whole

        require_whole(model)
    return model


def _as_model_dir(given: Path, console: Console | None) -> Path:
    # Here: every command imports this module, and `trirun --help` needs no reader of files.
    from ..checkpoint.formats import gguf_file

    name, model = model_name(given), local_model(given, console)
    file = gguf_file(model)
    if file is None and not _is_foreign(model):
        return model
    packed = cache_dir() / f"{name if file is None else file.stem}-{_fingerprint(file or model)}"
    if _is_packed(packed):
        return packed
    packed.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(packed.with_name(packed.name + ".lock"), f"packing {packed}", console):
        # Another run may have packed it meanwhile.
        if not _is_packed(packed):
            if console is not None:
                console.note(f"packing {file or model} into {packed}, once")
            from .pack import pack

            pack(file or model, packed, overwrite=True)
    return packed


def _is_packed(packed: Path) -> bool:
    """A checkpoint has its final name once it is whole."""
    return (packed / "config.json").is_file()


def _is_foreign(directory: Path) -> bool:
    """Whether another program has packed the layers of a model directory.

    Raises:
        InputError: in a variant of a known format that trirun does not read, or rotated.
    """
    from ..checkpoint.formats import ROTATION, open_foreign, open_source
    from ..checkpoint.model_dir import MLX_SECTION, quant_method, read_config
    from ..checkpoint.reader import QUANT_METHOD

    config = read_config(directory)
    plain = quant_method(config) in (None, QUANT_METHOD) and MLX_SECTION not in config
    if plain and not (directory / ROTATION).is_file():
        return False
    return open_foreign(open_source(directory)) is not None


def cache_dir() -> Path:
    """Where packed models are kept: ``trirun`` in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trirun"


def _fingerprint(model: Path) -> str:
    """What tells a file, or the files of a directory, from others, and from themselves after a change."""
    import hashlib

    told = [__version__]
    try:
        for file in sorted(model.iterdir()) if model.is_dir() else [model]:
            facts = file.stat()
            told.append(f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}")
    except OSError as error:
        raise InputError(f"{model}: {error.strerror}") from error
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
