"""One model of the server: where it comes from, and its service while it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ...checkpoint.model_dir import ModelDir, read_config
from ...engine.engine import Engine
from ...models.description import UnsupportedModel, chosen_context
from ...models.settings import text_settings
from ..event_bridge import EventBridge
from ..model import ServedModel
from ..operations.metrics import ModelMetrics
from ..service import Service
from ..thread import on_thread
from .memory import release_memory

State = Literal["unloaded", "loading", "loaded", "failed"]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        names: in the API; /v1/models lists it by the first one. load: reads it and starts its engine, on any thread.
        check: raises what :class:`~trirun_cli.checkpoint.model_dir.ModelDir` does where it can no longer be read.
        context: tokens of a sequence as far as its config tells, before it is loaded; None where that is not known.
        weight_bytes: of its files; about what it takes besides its cache.
    """

    names: Sequence[str]
    load: Callable[[], ServedModel]
    check: Callable[[], object] = _nothing
    context: int | None = None
    weight_bytes: int = 0


def source_of(names: Sequence[str], path: Path, load: Callable[[Path], ServedModel], ctx: int | None) -> Source:
    """The source of a model directory.

    Args:
        load: makes the model of the directory. ctx: tokens of a sequence that were asked for.

    Raises:
        InputError: the directory is not one of a model, or its weights are damaged.
    """
    config = read_config(path)
    try:
        context: int | None = chosen_context(config, ctx)
    except UnsupportedModel:
        longest = text_settings(config).get("max_position_embeddings")
        context = ctx or (longest if isinstance(longest, int) else None)
    size = sum(file.stat().st_size for file in ModelDir(path).files)
    return Source(names, partial(load, path), partial(ModelDir, path), context, size)


@dataclass(slots=True, eq=False)
class Entry:
    """A model of the pool.

    Attributes:
        service: while it is loaded. loading: its weights are being read. failed: its last load failed.
        held: requests that use it and have started nothing in the engine yet.
        used: time.monotonic of its last use.
    """

    source: Source
    service: Service | None = None
    loading: bool = False
    failed: bool = False
    held: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.source.names[0]

    @property
    def busy(self) -> bool:
        """Whether requests use it."""
        return self.held > 0 or (self.service is not None and self.service.busy)

    @property
    def state(self) -> State:
        """What to say of it."""
        if self.service is not None:
            return "loaded" if self.service.alive else "failed"
        return "loading" if self.loading else "failed" if self.failed else "unloaded"

    @property
    def context(self) -> int | None:
        """Tokens of a sequence; None where that is not known yet."""
        return self.source.context if self.service is None else self.service.context

    def engine(self) -> Engine | None:
        """The engine while the model is loaded."""
        return None if self.service is None else self.service.engine

    async def load(
        self, bridge: EventBridge, metrics: ModelMetrics, max_waiting: int | None, ended: Callable[[], None]
    ) -> None:
        """Load the model on another thread; arguments as of :class:`..service.Service`.

        Raises:
            Exception: any that the source raised.
        """
        self.loading = True
        try:
            model = await on_thread(self.source.load, "trirun-load")
        finally:
            self.loading = False
        metrics.configured(model.engine.slots, model.engine.context, model.why_slots)
        self.service = Service(model, bridge, metrics, self.source.names, max_waiting, ended)
        self.failed, self.used = False, time.monotonic()

    async def unload(self, metrics: ModelMetrics) -> None:
        """Stop the engine and give back its memory; no request may use it."""
        service, self.service = self.service, None
        assert service is not None
        metrics.unloaded(service.engine)
        # The thread must be the last to know the engine, and forget it before memory is released.
        stop = [service.engine.close]
        del service
        await on_thread(lambda: stop.pop()(), "trirun-unload")
        await on_thread(release_memory, "trirun-unload")
