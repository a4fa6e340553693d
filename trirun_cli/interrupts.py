"""Ctrl-C and a supervisor's SIGTERM as one KeyboardInterrupt, which nothing swallows."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

RETRY_S = 0.005


class Interrupts:
    """What the process does when it is asked to stop: unwind, so that partial outputs are cleaned up.

    An import is let finish first. Libraries catch whatever happens in their imports, and go on without the module that
    was interrupted. A second signal does not wait.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        handlers: dict[int, Any] = {signal.SIGALRM: self._again, signal.SIGTERM: self._stop}
        # Ignored, as for a job in the background, it stays ignored.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            handlers[signal.SIGINT] = self._stop
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._waiting or not importing(frame):
            self._raise()
        self._waiting = True
        signal.setitimer(signal.ITIMER_REAL, RETRY_S, RETRY_S)

    def _again(self, number: int, frame: FrameType | None) -> None:
        if not importing(frame):
            self._raise()

    def _raise(self) -> None:
        self._waiting = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported at this place of the program."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False
