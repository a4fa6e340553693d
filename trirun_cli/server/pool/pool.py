"""The models of a server by their names: loaded when asked for, unloaded when idle or in another's way.

Everything here runs on the event loop, but loading and unloading, which have a thread. Requests that wait for a model
stand in one queue. Its first one decides what is loaded next; once that is there, every request for it goes on. A model
in its way takes no new requests meanwhile, so that it becomes idle: no request waits longer than those before it take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Request

from ...errors import InputError, OutOfMemoryError, explain
from ..errors import ApiError
from ..event_bridge import EventBridge
from ..operations.metrics import Metrics
from ..service import Service
from .entry import Entry, Source
from .memory import free_bytes
from .ticket import Ticket

log = logging.getLogger("trirun.server")


class Pool:
    """The models of one server.

    Args:
        sources: of the models; their names differ. max_waiting: requests that may wait for a slot of a model, and for
            models to be loaded; None is no limit.
        max_loaded: models that are loaded at once; None is as many as the memory holds.
        idle_s: seconds after which a model without requests is unloaded; None is never.

    Attributes:
        created: when the pool was made, in seconds since 1970. draining: the server is stopping; every new request
            returns 503. metrics: of the server.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        max_waiting: int | None = None,
        max_loaded: int | None = None,
        idle_s: float | None = None,
    ) -> None:
        self.entries = [Entry(source) for source in sources]
        self.created, self.draining, self.metrics = int(time.time()), False, Metrics()
        self._by_name = {name: entry for entry in self.entries for name in entry.source.names}
        self._max_waiting, self._max_loaded, self._idle_s = max_waiting, max_loaded, idle_s
        self._queue: list[Ticket] = []
        self._bridge: EventBridge | None = None
        self._opened = False
        self._work: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        for entry in self.entries:
            self.metrics.add(entry.name, entry.engine)

    async def preload(self, bridge: EventBridge, count: int) -> None:
        """Load the first ``count`` models before the server takes requests.

        Args:
            bridge: carries the events of all models to the event loop.

        Raises:
            Exception: any that a source raised.
        """
        self._bridge = bridge
        for entry in self.entries[:count]:
            await self._load(entry)

    def open(self) -> None:
        """Take requests from now on."""
        self._opened = True
        self._schedule_unload()

    @property
    def names(self) -> list[str]:
        """Every name of every model."""
        return list(self._by_name)

    @property
    def status(self) -> str:
        """ "loading", "ok", "draining", or "dead" when the engine of the only model has failed."""
        if not self._opened:
            return "loading"
        if self.draining:
            return "draining"
        only = self.entries[0].service if len(self.entries) == 1 else None
        return "ok" if only is None or only.alive else "dead"

    def entry(self, name: str | None) -> Entry:
        """A model by its name; the only one where ``name`` is None.

        Raises:
            ApiError: 503, the server loads or stops; 404, there is no such model; 400, there are several.
        """
        status = self.status
        if name is not None and name not in self._by_name:
            message = f"the model {name[:200]!r} is not served here; this is {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if status in ("loading", "draining"):
            message = "the model is still loading" if status == "loading" else "the server is shutting down"
            raise ApiError(503, message, code=status, headers={"Retry-After": "5"})
        if name is None and len(self.entries) > 1:
            message = f"model is required: one of {', '.join(self.names)}"
            raise ApiError(400, message, param="model", code="missing_required_parameter")
        return self.entries[0] if name is None else self._by_name[name]

    @asynccontextmanager
    async def use(self, name: str | None, request: Request) -> AsyncIterator[Service]:
        """A model for one request, loaded where it is not; what the request starts in its engine keeps it loaded.

        Args:
            name: of the model; None is the only one. request: who leaves while the model is loaded waits no longer.

        Raises:
            ApiError: that of :meth:`entry`; 429, too many requests wait; 499, the client has left; 500 or 503, the
                model cannot be loaded.
        """
        entry = self.entry(name)
        if self._usable(entry) and entry not in self._leaving():
            entry.held += 1
        else:
            await self._wait(entry, request)
        try:
            assert entry.service is not None
            yield entry.service
        finally:
            entry.held -= 1
            self._changed(entry)

    def shut(self) -> None:
        """Take no more requests; those that wait for a model get 503."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._queue = self._queue, []
        for ticket in waiting:
            ticket.refuse(ApiError(503, "the server is shutting down", code="shutting_down"))

    def abort_all(self) -> None:
        """Cancel every request; clients get 503 ``shutting_down``, in a stream as its last event."""
        self.shut()
        for entry in self.entries:
            if entry.service is not None:
                entry.service.abort_all()

    def close(self) -> None:
        """Stop the engines, at the server's end; a load that still runs is left to the end of the process."""
        if self._work is not None:
            self._work.cancel()
        for entry in self.entries:
            if entry.service is not None:
                entry.service.engine.close()

    def _usable(self, entry: Entry) -> bool:
        # A dead engine of the only model stays, for the health check to tell; one of several is loaded again.
        return entry.service is not None and (entry.service.alive or len(self.entries) == 1)

    async def _wait(self, entry: Entry, request: Request) -> None:
        if self._max_waiting is not None and len(self._queue) > self._max_waiting:
            message = f"the server is busy: {len(self._queue)} requests wait for models to be loaded"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        ticket = Ticket(entry)
        self._queue.append(ticket)
        self._pump()
        try:
            await ticket.wait(request)
        except BaseException:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._changed(entry)
            raise

    def _loaded(self) -> list[Entry]:
        """The loaded models, the least recently used first."""
        return sorted((entry for entry in self.entries if entry.service is not None), key=lambda entry: entry.used)

    def _wanted(self) -> Entry | None:
        """The model that the first request in the queue waits for."""
        return next((ticket.entry for ticket in self._queue if not self._usable(ticket.entry)), None)

    def _leaving(self) -> list[Entry]:
        """The loaded models that the first request in the queue has no room beside: none, or the one to be unloaded."""
        wanted = self._wanted()
        if wanted is None or wanted.loading:
            return []
        if wanted.service is not None:
            return [wanted]
        loaded = self._loaded()
        full = self._max_loaded is not None and len(loaded) >= self._max_loaded
        if not loaded or not (full or wanted.source.weight_bytes > free_bytes()):
            return []
        return [next((entry for entry in loaded if not entry.busy), loaded[0])]

    def _pump(self) -> None:
        """Let requests go on whose models are there, and begin to load for the first that still waits."""
        leaving = self._leaving()
        self._admit([entry for entry in self.entries if self._usable(entry) and entry not in leaving])
        if self._queue and self._work is None and not self.draining and not any(entry.busy for entry in leaving):
            self._work = asyncio.ensure_future(self._make_room_and_load())
            self._work.add_done_callback(self._worked)

    def _admit(self, entries: Sequence[Entry]) -> None:
        for ticket in [ticket for ticket in self._queue if ticket.entry in entries]:
            self._queue.remove(ticket)
            ticket.admit()

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._work = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a model could not be unloaded", exc_info=error)
        if not self.draining:
            self._schedule_unload()
            self._pump()

    async def _make_room_and_load(self) -> None:
        """The work of one turn: unload one model, or load the one that the queue's first request waits for."""
        if (wanted := self._wanted()) is None:
            return
        try:
            # Before another model goes for one that is no longer there.
            wanted.source.check()
            if leaving := self._leaving():
                if not leaving[0].busy:
                    await self._unload(leaving[0])
                return
            await self._load(wanted)
            # All of its requests, before it is in the way of the next model.
            self._admit([wanted])
        except Exception as error:
            idle = [entry for entry in self._loaded() if not entry.busy]
            if isinstance(explain(error), OutOfMemoryError) and idle:
                await self._unload(idle[0])
            else:
                self._refuse(wanted, error)

    def _refuse(self, entry: Entry, error: Exception) -> None:
        """Tell every request for a model that it cannot be loaded; the next request tries again."""
        entry.failed = True
        known = explain(error)
        if known is None:
            log.error("the model %r could not be loaded", entry.name, exc_info=error)
        else:
            log.error("the model %r could not be loaded: %s", entry.name, known)
        status = 500 if known is None or isinstance(known, InputError) else 503
        reason = "the server's log has more" if known is None else str(known)
        mine = [ticket for ticket in self._queue if ticket.entry is entry]
        self._queue = [ticket for ticket in self._queue if ticket.entry is not entry]
        for ticket in mine:
            message = f"the model {entry.name!r} could not be loaded: {reason}"
            ticket.refuse(ApiError(status, message, code="model_load_failed"))

    async def _load(self, entry: Entry) -> None:
        assert self._bridge is not None
        metrics = self.metrics.of(entry.name)
        await entry.load(self._bridge, metrics, self._max_waiting, partial(self._changed, entry))
        if self._opened:
            log.info("loaded %s", entry.name)

    async def _unload(self, entry: Entry) -> None:
        await entry.unload(self.metrics.of(entry.name))
        log.info("unloaded %s", entry.name)

    def _changed(self, entry: Entry) -> None:
        """Requests of a model have ended or left."""
        entry.used = time.monotonic()
        if self._queue and not self.draining:
            self._pump()
        self._schedule_unload()

    def _schedule_unload(self) -> None:
        """Unload the models that have been idle for long enough, and come again when the next ones will have been."""
        if self._idle_s is None or self.draining:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = [entry for entry in self._loaded() if not entry.busy]
        if not idle or self._work is not None:
            return
        wait = idle[0].used + self._idle_s - time.monotonic()
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self._schedule_unload)
            return
        self._work = asyncio.ensure_future(self._unload(idle[0]))
        self._work.add_done_callback(self._worked)
