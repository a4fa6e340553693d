"""What a training run reports while it works. Rendering belongs to the caller."""

from __future__ import annotations

from .state import Evaluation


class TrainObserver:
    """Callbacks of a run, all no-ops; subclass and override what you render. Called from the calling thread only."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Progress of what comes before training: ``name`` is ``"start"`` (blocks) or ``"generate"`` (sequences)."""

    def resumed(self, step: int) -> None:
        """A stopped run continues after ``step``."""

    def step(self, step: int, done: float, kl: float, ce: float, tokens_per_second: float) -> None:
        """``step`` steps, a fraction ``done`` of the run, are over; losses are means over the steps since the last
        call, in nats per token."""

    def evaluated(self, evaluation: Evaluation, best: bool) -> None:
        """The held-out loss was measured; ``best``: it is the lowest so far."""

    def saved(self, step: int, stop: bool) -> None:
        """The run's state is on disk; ``stop``: because the run was interrupted."""
