"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress bars.")]
Device = Annotated[
    str, typer.Option(help="auto (first GPU, else CPU), cpu, cuda or cuda:N.", rich_help_panel="Machine")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it is not empty.")]
