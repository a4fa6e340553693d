"""What the workflows share around a checkpoint: the state beside it, its origin in the recipe, its size, refusals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from trirun_gptq.errors import StateError

from ..checkpoint.formats import gguf_file
from ..checkpoint.formats.gguf.file import GgufFile
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import file_hash
from ..errors import InputError


def state_dir(out: Path) -> Path:
    """``OUT.state``: where a run that writes ``OUT`` keeps what it has finished, until the checkpoint is complete."""
    return out.with_name(out.name + ".state")


@contextmanager
def resuming() -> Iterator[None]:
    """Around a run that may continue a stopped one.

    Raises:
        InputError: in the place of a StateError; it names the options that help.
    """
    try:
        yield
    except StateError as error:
        fix = "--overwrite removes that state; --no-resume starts over and leaves it"
        raise InputError(str(error), fix) from error


def model_origin(model: Path) -> dict[str, Any]:
    """A model as a published recipe names it: without its place on this machine, by the hub's name where it lies in the
    hub's cache, and by the SHA-256 of config.json and of every weight file, or of a GGUF file."""
    if (file := gguf_file(model)) is not None:
        cached = _hub_commit(file.parent)
        files = GgufFile(file).paths
        name = f"{cached}:{file.name}" if cached else file.name
    else:
        place = model.resolve()
        files = [model / "config.json", *map(Path, ModelDir(model).files)]
        name = _hub_commit(place) or place.name
    return {"name": name, "sha256": {file.name: file_hash(file) for file in files}}


def _hub_commit(place: Path) -> str | None:
    """ORG/NAME@COMMIT of a folder in the hub's cache; None of any other."""
    cached = place.parent.parent.name
    if place.parent.name != "snapshots" or not cached.startswith("models--"):
        return None
    return f"{cached.removeprefix('models--').replace('--', '/')}@{place.name}"


def text_origin(source: str) -> dict[str, str]:
    """A source of text as a published recipe names it: a file by its name and SHA-256, a dataset of the hub as it is
    written."""
    if source.startswith("hf:"):
        return {"name": source}
    return {"name": Path(source).name, "sha256": file_hash(Path(source))}


def matrix_kinds(model: nn.Module) -> str:
    """Why there is no linear layer in a model or a part of it, to be appended to a message: what its matrices belong to
    instead; "" where it has none."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, nn.Embedding | nn.Linear):
            kinds[type(module).__name__] += any(p.dim() >= 2 for p in module.parameters(recurse=False))
    found = " and ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return f": its matrices belong to {found} modules, and only nn.Linear is packed" if found else ""


def in_words(kept: Mapping[str, str]) -> str:
    """How many modules, and which, with the number of the layer left out: "2 × model.layers.*.conv (Conv1d [64, 1, 4])"
    for each kind."""
    kinds = Counter((in_all_layers(name), kind) for name, kind in kept.items())
    return ", ".join(f"{count} × {name} ({kind})" for (name, kind), count in kinds.items())


def in_all_layers(name: str) -> str:
    """A module's name with the numbers of layers left out: what modules of one kind share."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def weight_bytes(directory: Path) -> int:
    """Size of a model directory's weight files, in bytes."""
    return sum(file.stat().st_size for file in ModelDir(directory).files)
