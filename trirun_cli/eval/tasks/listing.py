"""What ``--tasks`` can name: ``trirun eval --tasks list``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..settings import BUILT_IN
from .offline import ALIASES, OFFLINE_TASKS, flat_task
from .resolve import tasks_root
from .rows import SUFFIXES

# A task's name in lm-eval's files, and what of its folders are none.
_NAMED = re.compile(r"(?m)^\W?(?:task|group|tag)\W?:[ \t]*[\"']?([A-Za-z0-9][\w.+-]*)")
_OTHER = {".py", ".pyc", ".md", ".json", ".jsonl", ".txt"}


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks of one kind.

    Attributes:
        title: what they are. data: where their data come from. names: of the tasks, sorted.
        families: of lm-eval's tasks, its folders and the number of names in each; else empty.
    """

    title: str
    data: str
    names: tuple[str, ...]
    families: tuple[tuple[str, int], ...] = ()


def task_groups(directories: Sequence[Path]) -> list[TaskGroup]:
    """Everything that ``--tasks`` can name here.

    Args:
        directories: of ``--data-dir``; its files of flat rows are tasks too.
    """
    offline = sorted({*OFFLINE_TASKS, *ALIASES, "mmlu", "mmlu_SUBJECT"})
    groups = [
        TaskGroup("built in", "--text, --model; wikitext2: the hub, or --data-dir", BUILT_IN),
        TaskGroup("lm-eval's, also offline", "--data-dir, or the hub", tuple(offline)),
        TaskGroup("files of --data-dir", "--data-dir only", _flat_files(directories)),
    ]
    families = _families()
    names = sorted({name for found in families.values() for name in found} - set(offline))
    counts = tuple((folder, len(found)) for folder, found in sorted(families.items()) if found)
    groups.append(TaskGroup("lm-eval's", "the hub", tuple(names), counts))
    return groups


def _flat_files(directories: Sequence[Path]) -> tuple[str, ...]:
    """Names of the files that are tasks by themselves."""
    found = set()
    for directory in directories:
        files = [directory] if directory.is_file() else sorted(directory.iterdir())
        for file in files:
            if file.is_file() and file.suffix in SUFFIXES and file.stem not in OFFLINE_TASKS and _is_flat(file):
                found.add(file.stem)
    return tuple(sorted(found))


def _is_flat(file: Path) -> bool:
    from ...errors import InputError

    try:
        return flat_task(file) is not None
    except InputError:
        return False


def _families() -> dict[str, set[str]]:
    """Names of lm-eval's tasks, groups and tags by its top-level folders; empty where lm-eval is not installed."""
    try:
        root = tasks_root()
    except ModuleNotFoundError:
        return {}
    families: dict[str, set[str]] = {}
    for file in root.rglob("*"):
        folder = file.relative_to(root).parts[0]
        if file.suffix not in _OTHER and file.is_file() and file.parent != root:
            text = file.read_text(encoding="utf-8", errors="replace")
            families.setdefault(folder, set()).update(_NAMED.findall(text))
    return families
