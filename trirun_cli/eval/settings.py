"""What an evaluation is asked to do, and how it reports on the way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Tasks that need no lm-eval.
TEXT_TASKS = ("perplexity", "wikitext2")
BUILT_IN = (*TEXT_TASKS, "kl")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``trirun eval``, which explains them."""

    tasks: tuple[str, ...]
    text: Path | None = None
    window: int | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    data_dirs: tuple[Path, ...] = ()
    chat_template: bool = False
    seed: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    act_bits: int | None = None
    kv_cache_dtype: str = "auto"
    head: str = "auto"
    as_served: bool = False
    resume: Path | None = None
    threads: int | None = None
    context: int | None = None

    @property
    def harness_tasks(self) -> list[str]:
        """The tasks that lm-eval runs."""
        return [task for task in self.tasks if task not in BUILT_IN]


class Progress(Protocol):
    """A progress bar."""

    def advance(self, steps: float = 1) -> None:
        """Move it."""


class Reporter(Protocol):
    """Where an evaluation says what it does, such as :class:`trirun_cli.console.Console`."""

    def note(self, message: str) -> None:
        """A step, or a fact about it."""

    def warn(self, message: str) -> None:
        """A fact that may change what the results mean."""

    def progress(self, description: str, total: int | None = None) -> AbstractContextManager[Progress]:
        """A progress bar of ``total`` steps."""
