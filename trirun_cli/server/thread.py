"""Work away from the event loop, on threads that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ApiError

T = TypeVar("T")


async def on_thread(work: Callable[[], T], name: str) -> T:
    """Run on a daemon thread of that name: the process does not wait for it when it is told to stop."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            set_outcome(outcome)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = result.set_result, work()
        except BaseException as error:
            outcome = result.set_exception, error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result


class Preparation:
    """Runs what comes before the engine on threads: templates, tokenization, grammars.

    Args:
        threads: at once; more would keep the event loop waiting for Python's lock. seconds: that one may take.
    """

    def __init__(self, threads: int = 2, seconds: float = 20.0) -> None:
        self._free, self._seconds = asyncio.Semaphore(threads), seconds

    async def run(self, work: Callable[[], T], param: str) -> T:
        """The result of ``work``, which belongs to the request's field ``param``.

        Raises:
            ApiError: 400, it takes too long; its thread is then left to itself. Exception: any that ``work`` raises.
        """
        async with self._free:
            try:
                async with asyncio.timeout(self._seconds) as limit:
                    return await on_thread(work, "trirun-prepare")
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"{param}: takes more than {self._seconds:g} s to prepare"
                raise ApiError(400, message, param=param, code="too_complex") from None
