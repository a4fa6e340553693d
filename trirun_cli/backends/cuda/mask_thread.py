"""Masks of grammars that are made beside other work of the host."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from weakref import finalize

from ...processors import one_left_alone


class MaskThread:
    """Fills masks while whoever asked for them goes on, one lot at a time. An executor with its futures takes as long
    as the masks of some texts."""

    def __init__(self) -> None:
        self._lots: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._filled: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._under_way = False

    def begin(self, fill: Callable[[], None]) -> None:
        """Call a :func:`~trirun_cli.engine.constraint.mask_filler`; nobody else may use its constraints, or write to
        its rows, before :meth:`end`."""
        if self._thread is None:
            queues = self._lots, self._begun, self._filled
            self._thread = Thread(target=self._run, args=queues, name="trirun-masks", daemon=True)
            with one_left_alone():
                self._thread.start()
            finalize(self, self._lots.put, None)
        self._lots.put(fill)
        # Python runs one thread at a time and lets another in when this one waits. Once that one is within a library's
        # masks, which need no Python, both go on.
        self._begun.get()
        self._under_way = True

    def end(self) -> None:
        """Wait for them; raises what went wrong."""
        if self._under_way:
            self._under_way = False
            if (error := self._filled.get()) is not None:
                raise error

    @staticmethod
    def _run(
        lots: SimpleQueue[Callable[[], None] | None],
        begun: SimpleQueue[None],
        filled: SimpleQueue[BaseException | None],
    ) -> None:
        while (fill := lots.get()) is not None:
            begun.put(None)
            try:
                fill()
            except BaseException as error:
                filled.put(error)
            else:
                filled.put(None)
            del fill
