"""What a run reports while it works: one callback, which receives one event per call.

Quantizing and training call ``progress(event)`` from the calling thread only. A callback looks at the events that it
knows and leaves the others::

    def progress(event: Event) -> None:
        match event:
            case Stage(name, done, total):
                print(name, done, total)
            case Warned(message):
                print(message)

An exception that a callback raises ends the run, as Ctrl-C would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Event:
    """Base class of all that a progress callback receives."""

    __slots__ = ()


ProgressCallback = Callable[[Event], None]


def silent(event: Event) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """Once, before the first block: how many blocks and linear layers there are, on how many calibration tokens."""

    blocks: int
    modules: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BlockStarted(Event):
    """Block ``index`` (from 0) of ``total`` begins; ``name`` is its path in the model."""

    index: int
    total: int
    name: str


@dataclass(frozen=True, slots=True)
class ModuleStarted(Event):
    """Linear layer ``index`` (from 0) of ``total`` is to be packed; ``name`` is its path in the model."""

    index: int
    total: int
    name: str


@dataclass(frozen=True, slots=True)
class Stage(Event):
    """``done`` of ``total`` steps of a stage are complete.

    Stages of a quantization are ``scan`` (tensors) and ``embed`` before all blocks, ``hessian``, ``solve``, ``refine``
    and ``replay`` within one, and ``e2e`` after all of them; of a training, before its first step, ``start`` (blocks)
    and ``generate`` (sequences).
    """

    name: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Warned(Event):
    """Something the user should know that is not an error (damping that was raised, a block rolled back)."""

    message: str
