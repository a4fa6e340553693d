"""What the views of long runs share: a progress callback that draws one bar."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from trirun_gptq.run.progress import Event

from ...console import Console


class ProgressView:
    """A progress callback with a bar, which is there as long as the context lasts."""

    title = "preparing"

    def __init__(self, console: Console) -> None:
        self.console, self._stack = console, ExitStack()

    def __enter__(self) -> Self:
        self.bar = self._stack.enter_context(self.console.progress(self.title))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        raise NotImplementedError
