"""Masks of grammars that are made beside other work of the host."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from weakref import finalize

from ...processors import one_left_alone

# What takes tokens in, and what fills masks.
_Lot = tuple[Callable[[], None], Callable[[], None]]


class MaskThread:
    """Takes tokens in and fills masks while whoever asked for them goes on, one lot at a time. An executor with its
    futures takes as long as the masks of some texts."""

    def __init__(self) -> None:
        self._lots: SimpleQueue[_Lot | None] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._filled: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._under_way = False

    def begin(self, take: Callable[[], None], fill: Callable[[], None]) -> None:
        """Call both; nobody else may use the constraints, or write to the masks, before :meth:`end`.

        Args:
            take: waits for tokens and takes them in; it is over when this returns. fill: a
                :func:`~trirun_cli.engine.constraint.mask_filler`.
        """
        if self._thread is None:
            queues = self._lots, self._taken, self._filled
            self._thread = Thread(target=self._run, args=queues, name="trirun-masks", daemon=True)
            with one_left_alone():
                self._thread.start()
            finalize(self, self._lots.put, None)
        self._lots.put((take, fill))
        self._under_way = True
        # Python runs one thread at a time and lets another in when this one waits. Once that one is within a library's
        # masks, which need no Python, both go on.
        self._taken.get()

    def end(self) -> None:
        """Wait for them; raises what went wrong."""
        if self._under_way:
            self._under_way = False
            if (error := self._filled.get()) is not None:
                raise error

    @staticmethod
    def _run(
        lots: SimpleQueue[_Lot | None],
        taken: SimpleQueue[None],
        filled: SimpleQueue[BaseException | None],
    ) -> None:
        while (lot := lots.get()) is not None:
            take, fill = lot
            failure: BaseException | None = None
            try:
                try:
                    take()
                finally:
                    taken.put(None)
                fill()
            except BaseException as error:
                failure = error
            filled.put(failure)
            del lot, take, fill, failure
