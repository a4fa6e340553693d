"""The command line: one Typer app, one module per command, one place where exceptions become messages."""

from __future__ import annotations

import io
import os
import sys
from types import ModuleType
from typing import Annotated

import typer

from ..console import Console
from ..errors import TrirunError, explain, is_panic
from ..interrupts import Interrupts
from ..version import __version__
from . import bench, chat, doctor, export, finetune, generate, inspect, pack, quantize, serve, verify, version
from . import eval as evaluate
from .shared.options import Command, Group, help_text

app = typer.Typer(
    name="trirun",
    cls=Group,
    help="Quantize language models to 2 bits or ternary, and run them at the speed of memory.",
    epilog="Start with: trirun quantize MODEL --wbits 2, then trirun generate DIR",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        Console().text(f"trirun {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show trirun's version and exit."),
    ] = False,
) -> None:
    pass


_PANELS: dict[str, dict[str, ModuleType]] = {
    "Make a checkpoint": {"quantize": quantize, "pack": pack, "finetune": finetune, "export": export},
    "Run it": {"generate": generate, "chat": chat, "serve": serve, "eval": evaluate},
    "Look inside": {"inspect": inspect, "verify": verify, "doctor": doctor, "version": version},
}
for _panel, _modules in _PANELS.items():
    for _name, _module in _modules.items():
        app.command(_name, cls=Command, help=help_text(_module.command), rich_help_panel=_panel)(_module.command)
app.add_typer(bench.app, name="bench", rich_help_panel="Look inside")


def _settle_streams() -> None:
    """Text that comes in is UTF-8 or refused, whatever the locale; what goes out never fails for a character that the
    terminal does not have. A stream that the caller has closed is empty, and no file of ours takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (stays open as the process does)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_unwritable_output() -> None:
    """What cannot be written has been said; Python would try again as it ends, and end as 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the command line. Exit codes are those of :mod:`trirun_cli.errors`; 130 after Ctrl-C."""
    _settle_streams()
    try:
        with Interrupts():
            app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        stops = not isinstance(error, Exception) and not is_panic(error)
        if stops or os.environ.get("TRIRUN_DEBUG", "0") not in ("", "0"):
            raise
        known = explain(error)
        if known is None:
            message = f"{type(error).__name__}: {error}"
            known = TrirunError(f"internal error: {message}", "TRIRUN_DEBUG=1 shows where; please report it")
        Console().error(known)
        _drop_unwritable_output()
        sys.exit(known.exit_code)
