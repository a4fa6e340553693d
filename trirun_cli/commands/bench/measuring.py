"""What the benchmarks share: checks of their options, the device, and results as far as they got."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...errors import UsageError
from ...processors import set_torch_threads
from ..shared.options import check_output, check_threads, let_threads_sleep

if TYPE_CHECKING:
    import torch

    from ...console import Console, ProgressBar

Cell = TypeVar("Cell")


def positive_numbers(option: str, text: str) -> list[int]:
    """Comma-separated positive integers, ascending, without repeats.

    Raises:
        UsageError: naming the option and the word that is none, or is too large for any size.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", word):
            raise UsageError(f"{option} {word}: not a positive number")
    return sorted({int(word) for word in words})


def check_measuring(seconds: float, group_size: int = -1) -> None:
    """Check --seconds and --group-size.

    Raises:
        UsageError: naming the option.
    """
    if not (seconds > 0 and isfinite(seconds)):
        raise UsageError(f"--seconds {seconds:g}: more than 0, and an end")
    if group_size not in (-1, 32, 64, 128):
        raise UsageError(f"--group-size {group_size}: -1, 32, 64 or 128")


def check_plot(path: Path | None) -> None:
    """Check --plot before anything is measured.

    Raises:
        UsageError: its suffix is not of an image. InputError: it cannot be written. MissingError: matplotlib is not
            installed.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: a name that ends in .png, .svg or .pdf")
    check_output("--plot", path)
    from ...bench.plot import require_matplotlib

    require_matplotlib()


def measuring_device(console: Console, device: str, threads: int | None = None) -> tuple[torch.device, str | None]:
    """The device to measure, and what :func:`busy` says, for the document; warns where that changes the timings.

    To be called before torch is imported, since OpenMP reads how its threads wait only once.

    Args:
        device: of ``--device``. threads: of ``--threads``, which torch then computes with.

    Raises:
        UsageError: there is no such device, or not as many processors. MissingError: the device is not there.
    """
    check_threads(threads)
    load = sleep_if_busy()
    import torch

    from ...backends.device import pick_device

    set_torch_threads(threads)
    place = torch.device(pick_device(device))
    if load and place.type == "cpu":
        console.warn(f"{load}: other work takes part in these timings")
    return place, load


def sleep_if_busy() -> str | None:
    """Let torch's threads sleep while they wait (:func:`let_threads_sleep`) where other programs use the processors.

    Elsewhere they wait as torch has them do, since torch's own speed is to be measured: a product of 1024 × 1024 with
    one row takes two cores 50 µs with threads that spin and 130 with threads that have to be woken. On two cores that
    other programs use too, it takes 12 ms with the first and 0.16 with the second.

    Returns:
        what :func:`busy` says.
    """
    load = busy()
    if load:
        let_threads_sleep()
    return load


def busy() -> str | None:
    """The load average, for people, where other programs use this machine's processors; otherwise None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load average {load:.1f} on {cores} cores" if load > max(1.0, 0.75 * cores) else None


def gather(cells: Iterable[Cell], bar: ProgressBar) -> list[Cell]:
    """The cells that a benchmark measures; after Ctrl-C, those that are done.

    Raises:
        KeyboardInterrupt: none is done.
    """
    done: list[Cell] = []
    try:
        for cell in cells:
            done.append(cell)
            bar.advance()
    except KeyboardInterrupt:
        if not done:
            raise
    return done


def end_gathering(console: Console, done: int, total: int) -> None:
    """End the command as Ctrl-C does if measurements are missing; to be called once the others are shown.

    Raises:
        KeyboardInterrupt: done < total.
    """
    if done < total:
        console.warn(f"stopped after {done} of {total} measurements")
        raise KeyboardInterrupt
