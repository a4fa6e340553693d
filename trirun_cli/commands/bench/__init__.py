"""``trirun bench``: how fast this machine is, and its kernels beside their peers."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ...errors import UsageError
from ..shared.options import Command, Device, Group, Json, Quiet, Threads, help_text, options_given
from . import f16acc, kernels, model, serve

app = typer.Typer(cls=Group, invoke_without_command=True)

_QUICK_ROWS = "1,16"


@app.callback()
def machine(
    context: typer.Context, threads: Threads = None, device: Device = "auto", json: Json = False, quiet: Quiet = False
) -> None:
    """Measure this machine, its kernels, and whole models.

    Without a command: memory, arithmetic, and the kernels on a few shapes.

    Example: trirun bench --json
    """
    if context.invoked_subcommand is None:
        kernels.command(shapes=None, m=_QUICK_ROWS, threads=threads, device=device, json=json, quiet=quiet)
    elif misplaced := options_given(context):
        name = misplaced[0]
        raise UsageError(f"{name} belongs after the command: trirun bench {context.invoked_subcommand} {name} ...")


_COMMANDS: dict[str, Callable[..., None]] = {
    "kernels": kernels.command,
    "model": model.command,
    "serve": serve.command,
    "f16acc": f16acc.command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=Command, help=help_text(_command))(_command)
