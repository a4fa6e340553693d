"""How long a run is expected to take, as an event and for people."""

from __future__ import annotations

from dataclasses import dataclass

from .progress import Event


@dataclass(frozen=True, slots=True)
class TimePlan(Event):
    """About how long a run takes, seconds of wall time; an event before the first block.

    Attributes:
        stages: by stage, as ``Report.stages`` has them in the end; what was before the blocks is measured.
        blocks: of every block, all of its stages together. end: of what follows the last block, with ``end_steps``
            steps of training.
    """

    stages: dict[str, float]
    blocks: tuple[float, ...]
    end: float
    end_steps: int

    @property
    def seconds(self) -> float:
        """The whole run."""
        return sum(self.stages.values())


def duration(seconds: float) -> str:
    """About so much time: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
