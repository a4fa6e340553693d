"""Texts of one HTTP request whose embeddings the engine computes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..engine.request import Event, FinishReason, Pooling, QueueFull, Request
from ..engine.sampling import SamplingParams
from .errors import ApiError

if TYPE_CHECKING:
    import numpy as np

    from ..engine.engine import Engine
    from .event_bridge import EventBridge
    from .operations.metrics import ModelMetrics


class EmbeddingGroup:
    """The texts of one request, of which as many are in the engine as it has slots.

    Args:
        engine: runs them. bridge: carries its events to this event loop. metrics: of the model.
    """

    def __init__(self, engine: Engine, bridge: EventBridge, metrics: ModelMetrics) -> None:
        self._engine, self._bridge, self._metrics = engine, bridge, metrics
        self._open: dict[str, asyncio.Future[np.ndarray]] = {}
        self._free = asyncio.Semaphore(engine.slots)

    async def run(self, prompts: Sequence[tuple[int, ...]], pooling: Pooling) -> list[np.ndarray]:
        """Float32 [hidden] for each prompt, in order.

        Raises:
            ApiError: 429, the engine's queue is full; 500 or 503, it failed or is stopping. TrirunError: it refuses a
                prompt.
        """
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(self._one(prompt, pooling)) for prompt in prompts]
        return [task.result() for task in found]

    def abort(self, error: ApiError) -> None:
        """Cancel every text that is in the engine; the client gets ``error``."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Cancel what still runs in the engine."""
        for request_id in self._open:
            self._engine.abort(request_id)

    async def _one(self, prompt: tuple[int, ...], pooling: Pooling) -> np.ndarray:
        async with self._free:
            request = Request(uuid.uuid4().hex, prompt, SamplingParams(max_tokens=0), pooling=pooling)
            future = asyncio.get_running_loop().create_future()
            self._open[request.id] = future
            try:
                self._engine.submit(request, self._bridge.sink_for(partial(self._receive, future)))
                found = await future
            except QueueFull as error:
                message = f"the server is busy: {error}"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"}) from error
            except BaseException:
                self._engine.abort(request.id)
                self._metrics.ended("abort")
                raise
            finally:
                del self._open[request.id]
            self._metrics.ended("stop")
            return found

    def _receive(self, future: asyncio.Future[np.ndarray], event: Event) -> None:
        if future.done():
            return
        if event.embedding is not None:
            future.set_result(event.embedding)
        elif event.finish is FinishReason.ERROR:
            future.set_exception(ApiError(500, f"the engine failed: {event.error}", code="engine_error"))
        elif event.finish is not None:
            future.set_exception(ApiError(503, "the server is shutting down", code="shutting_down"))
