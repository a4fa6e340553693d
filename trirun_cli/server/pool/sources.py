"""What the command line names as models to serve: their directories, and their names in the API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...checkpoint.formats import GGUF, gguf_file
from ...checkpoint.hub import model_name
from ...checkpoint.model_dir import read_config
from ...errors import UsageError
from ...workflows.import_cache import as_model_dir

if TYPE_CHECKING:
    from ...console import Console


class ModelSource(NamedTuple):
    """A model to serve: its names in the API, and its directory."""

    names: list[str]
    path: Path


def model_sources(
    given: Sequence[Path], names: Sequence[str] = (), console: Console | None = None, *, verify: bool = False
) -> list[ModelSource]:
    """The models that a command was given, each of them there.

    Args:
        given: a model each: a directory, a GGUF file, a hub's name, or one of these as NAME=MODEL; or a folder whose
            folders are models. names: all of the only model, or one of each. console: of downloads and packing.
        verify: hold their files against their checksums.

    Raises:
        UsageError: the names are not as many as the models, or two models have the same. InputError: one of them is
            missing or no model. CheckFailed: ``verify``, and a file differs.
    """
    found = [each for path in given for each in _expanded(*_named(path))]
    if names and len(found) > 1:
        if len(names) != len(found):
            reason = f"--served-model-name is given {len(names)} times for {len(found)} models"
            raise UsageError(reason, "give one name for each, in their order, or NAME=MODEL")
        found = [(name, path) for name, (_, path) in zip(names, found, strict=True)]
    twice = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
    if twice:
        raise UsageError(f"two models have the name {twice[0]!r}", "name them apart: NAME=MODEL")
    only = list(names) if len(found) == 1 else []
    sources = [ModelSource(only or [name], as_model_dir(path, console, verify=verify)) for name, path in found]
    for source in sources:
        read_config(source.path)
    return sources


def _named(given: Path) -> tuple[str | None, Path]:
    name, equals, path = str(given).partition("=")
    if not equals or given.exists():
        return None, given
    if not name.strip() or not name.isprintable() or not path:
        raise UsageError(f"{given}: NAME=MODEL needs a name of printable characters and a model")
    return name, Path(path)


def _expanded(name: str | None, path: Path) -> list[tuple[str, Path]]:
    """The model, or the models of a folder by their names in it."""
    if path.is_dir() and not (path / "config.json").exists() and not list(path.glob(f"*{GGUF}")):
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_model(folder)]
        if inside and name is not None:
            raise UsageError(f"{name}={path}: a folder of {len(inside)} models has no single name")
        if inside:
            return [(folder.name, folder) for folder in inside]
    return [(name or model_name(path), path)]


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or gguf_file(folder) is not None
