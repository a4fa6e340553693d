"""What a console was told, for tests of what a user sees while something goes on."""

from __future__ import annotations

import threading

from trirun_cli.console import Console


class Told(Console):
    """Notes as a list, and an event that is set by the first."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.spoke = threading.Event()

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.spoke.set()
