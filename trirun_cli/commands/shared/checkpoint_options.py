"""How a command is told which model to run: ``trirun generate DIR``, ``--checkpoint DIR``, or ``--model ORIGINAL``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import UsageError

CheckpointArgument = Annotated[
    Path | None,
    typer.Argument(
        help="Packed checkpoint, or a model of another kind: a directory, a GGUF file, the hub's ORG/NAME, or demo.",
        show_default=False,
    ),
]
PackedArgument = Annotated[
    Path | None, typer.Argument(help="Packed checkpoint: a directory, or a name of the hub.", show_default=False)
]
CheckpointOption = Annotated[Path | None, typer.Option("--checkpoint", "-c", help="The same, as an option.")]
OriginalOption = Annotated[
    Path | None, typer.Option("--model", "-m", help="The original, unquantized model, in the checkpoint's place.")
]

Verify = Annotated[
    bool,
    typer.Option("--verify", help="First check the SHA-256 of every file; exit code 6 if one differs."),
]


def one_checkpoint(argument: Path | None, option: Path | None, original: Path | None = None) -> Path:
    """The one model that a command was given, by whichever name.

    Args:
        argument: without an option's name. option: of ``--checkpoint``. original: of ``--model``.

    Raises:
        UsageError: there is none, or there are several.
    """
    given = {"CHECKPOINT": argument, "--checkpoint": option, "--model": original}
    named = {name: path for name, path in given.items() if path is not None}
    if not named:
        raise UsageError("no checkpoint is given", "name its directory, or demo for the model that ships with trirun")
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} are both given; one is enough")
    return next(iter(named.values()))
