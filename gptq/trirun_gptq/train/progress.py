"""The events of a training run, beside those of :mod:`trirun_gptq.run.progress`."""

from __future__ import annotations

from dataclasses import dataclass

from ..run.progress import Event
from .state import Evaluation


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A stopped run continues after ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class StepsDone(Event):
    """Steps are over.

    Attributes:
        step: how many. done: the fraction of the run, 0..1.
        kl, ce: means over the steps since the last such event, nats per token.
        tokens_per_second: of all devices together.
    """

    step: int
    done: float
    kl: float
    ce: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """The held-out loss was measured; ``best``: it is the lowest so far."""

    evaluation: Evaluation
    best: bool


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """The run's state after ``step`` is on disk; ``stop``: because the run was interrupted."""

    step: int
    stop: bool
