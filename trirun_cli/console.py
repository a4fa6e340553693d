"""The one place that writes to the terminal: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.markup import escape

from .errors import TrirunError, printable

if TYPE_CHECKING:
    from rich.progress import Progress


class Console:
    """Output of one command.

    Args:
        as_json: stdout carries one JSON document and nothing else; tables and notes are not printed.
        quiet: no notes and no progress; warnings and errors still appear.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        # Into a pipe or a file, tables take the room they need.
        width = None if sys.stdout.isatty() else 160
        # Without emoji: hf:x:y is no cross mark.
        self._out = RichConsole(highlight=False, emoji=False, soft_wrap=True, width=width)
        self._err = RichConsole(stderr=True, highlight=False, emoji=False, soft_wrap=True)

    def json(self, schema: str, document: dict[str, Any]) -> None:
        """Print the command's JSON document when --json was given; ``schema`` names its kind and version. Numbers that
        JSON does not have, NaN and the infinities, are null."""
        if self.as_json:
            document = _finite({"schema": f"trirun.{schema}", **document})
            # Flushed here, so that a full disk ends the command as a failure and not after it.
            print(json.dumps(document, indent=2, default=str, allow_nan=False), flush=True)

    def text(self, text: str, end: str = "\n") -> None:
        """Result text exactly as it is (generated tokens, for instance), flushed at once."""
        if not self.as_json:
            sys.stdout.write(text + end)
            sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A result table; all columns but the first are right-aligned. Where the terminal is narrower, headings and
        names take several lines; no number is ever cut."""
        if self.as_json:
            return
        from rich.table import Table

        body = [[printable(str(cell)) for cell in row] for row in rows]
        borders = 3 * len(columns) + 1
        widths = _column_widths(columns, body, self._out.width - borders)
        table = Table(title=_shown(title), title_justify="left")
        for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
            table.add_column(escape(column), justify="right" if index else "left", width=width, overflow="fold")
        for row in body:
            table.add_row(*map(escape, row))
        # Beyond its width a terminal breaks lines by itself; rich would cut them.
        before, self._out.width = self._out.width, max(self._out.width, sum(widths) + borders)
        self._out.print(table)
        self._out.width = before

    def note(self, message: str) -> None:
        """What is going on, for a person watching."""
        if not self.quiet:
            self._err.print(_shown(message), style="dim")

    def warn(self, message: str) -> None:
        """What may be wrong, though work goes on; shown with --quiet too."""
        self._err.print(f"[yellow]warning:[/yellow] {_shown(message)}")

    def error(self, error: TrirunError) -> None:
        """Why a command ended, and below it what to do, if the error knows."""
        self._err.print(f"[red]error:[/red] {_shown(str(error))}")
        if error.fix:
            self._err.print(f"  [dim]{_shown(error.fix)}[/dim]")

    @contextmanager
    def progress(self, description: str, total: int | None = None) -> Iterator[ProgressBar]:
        """A progress bar with elapsed and remaining time on stderr, shown only on a terminal."""
        # Here and above: most commands show neither, and every command imports this module.
        from rich import progress as parts

        columns = (
            parts.TextColumn("{task.description}", markup=False),
            parts.BarColumn(),
            parts.MofNCompleteColumn(),
            parts.TextColumn("elapsed"),
            parts.TimeElapsedColumn(),
            parts.TextColumn("left"),
            parts.TimeRemainingColumn(),
        )
        hidden = self.quiet or self.as_json or not self._err.is_terminal
        with parts.Progress(*columns, console=self._err, disable=hidden, transient=True) as bars:
            yield ProgressBar(bars, bars.add_task(printable(description), total=total))


class ProgressBar:
    """One bar of :meth:`Console.progress`."""

    def __init__(self, bars: Progress, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, steps: float = 1) -> None:
        """So many more steps are done."""
        self._bars.advance(self._task, steps)

    def describe(self, description: str) -> None:
        """Replace the text before the bar."""
        self._bars.update(self._task, description=printable(description))

    def reset(self, total: int) -> None:
        """Begin anew with another number of steps."""
        self._bars.reset(self._task, total=total)


def _shown(text: str) -> str:
    """A text of one or more lines as rich prints it as it is; what would speak to the terminal is written out."""
    return escape("\n".join(map(printable, text.split("\n"))))


def _column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths in characters: each column's own where they fit ``room``; else what its cells and the words of its heading
    need, and what is left to the first columns. Names, in the first one, are folded, to 8 characters if need be."""
    wide = [[cell_len(row[index]) for row in rows] for index in range(len(columns))]
    words = [max(map(cell_len, column.split()), default=1) for column in columns]
    own = [max([cell_len(column), *cells]) for column, cells in zip(columns, wide, strict=True)]
    least = [max([word, *cells]) for word, cells in zip(words, wide, strict=True)]
    if least:
        least[0] = min(least[0], max(words[0], 8))
    left = max(room - sum(least), 0)
    for index, (needed, wanted) in enumerate(zip(least, own, strict=True)):
        more = min(left, wanted - needed)
        least[index] += more
        left -= more
    return least


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def bytes_text(count: int | float) -> str:
    """A byte count for people: 1024-based, with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
