"""How many threads to compute with: as many processors as this process may use, unless the user says another number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Where the limits of containers are: version 2 of cgroups, and version 1.
_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def default_threads() -> int:
    """The first number of ``OMP_NUM_THREADS``, at most one per processor; without one, :func:`usable_processors`."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isascii() and first.isdecimal() and int(first) > 0:
        return min(int(first), processors())
    return usable_processors()


def processors() -> int:
    """Processors that this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0))


def usable_processors() -> int:
    """:func:`processors`, or fewer where a container's quota of processor time is less than all of them; at least 1.

    A thread beyond the quota does not add speed: all threads are stopped once the quota of a period is used.
    """
    quota = cpu_quota()
    return processors() if quota is None else max(1, min(processors(), -int(-quota // 1)))


@contextmanager
def one_left_alone() -> Iterator[None]:
    """Threads that begin here keep off one processor, if there are others. A thread that sleeps and wakes finds its own
    taken by those it waited for, and moves to another, whose caches are cold: it settles where none of them is."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed - {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def cpu_quota(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Processors' worth of time that this process's control groups grant it, the least of all; None without a limit.

    Args:
        cgroups: where they are mounted. membership: the file that says which ones this process is in.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, read = cgroups, _quota_v2
        elif "cpu" in controllers.split(","):
            root, read = cgroups / "cpu", _quota_v1
        else:
            continue
        here = root / path.lstrip("/")
        # In a container the path may be that of the host, of which only the root is mounted.
        quotas += [read(group) for group in (here, *here.parents) if group.is_relative_to(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def set_torch_threads(threads: int | None) -> None:
    """Let torch compute with ``threads`` threads on the CPU; None leaves it its own number, at most
    :func:`default_threads`."""
    import torch

    torch.set_num_threads(threads or min(torch.get_num_threads(), default_threads()))


def _quota_v2(group: Path) -> float | None:
    """Of ``cpu.max``: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    return _ratio(_words(group / "cpu.max"))


def _quota_v1(group: Path) -> float | None:
    return _ratio(_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"))


def _ratio(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
