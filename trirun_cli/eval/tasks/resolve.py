"""From task names to lm-eval's task objects: from local files where --data-dir is given, otherwise from the hub."""

from __future__ import annotations

import difflib
import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ...errors import InputError, MissingError, UsageError
from ...missing import missing_package
from . import offline
from .offline import ALIASES, MMLU, MMLU_DIR, OFFLINE_TASKS, OfflineTask
from .row_schemas import schema_of
from .rows import first_row


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A task or group of lm-eval, loaded.

    Attributes:
        name: in lm-eval. loaded: the argument of ``lm_eval.evaluator.evaluate``.
        files: that its data are from; none with the hub's. prompts: where its prompts are from, for people.
    """

    name: str
    loaded: Any
    files: tuple[Path, ...] = ()
    prompts: str = "lm-eval"

    @property
    def leaves(self) -> dict[str, Any]:
        """The tasks by name, without the groups."""
        return self.loaded["tasks"]

    def data(self) -> list[dict[str, str]]:
        """Name and SHA-256 of each local file."""
        return [{"file": str(file), "sha256": _digest(file)} for file in self.files]


@dataclass(slots=True)
class Loader:
    """Loads tasks by name.

    Args:
        directories: of ``--data-dir``; none means the hub.
        num_fewshot: examples in each prompt; None takes each task's own number, or 0.
    """

    directories: Sequence[Path]
    num_fewshot: int | None
    warnings: list[str] = field(default_factory=list)
    _hub: Any = None

    def load(self, name: str) -> HarnessTask:
        """The task or group of that name, its data read and checked.

        Raises:
            UsageError: there is no such task, or not enough examples for its prompts. InputError: its data are missing
                or malformed. MissingError: lm-eval is not installed.
        """
        name = ALIASES.get(name, name)
        root = tasks_root()
        if self.directories:
            if name in OFFLINE_TASKS:
                task = self._local(name, root)
            elif name == "mmlu" or name.startswith("mmlu_"):
                task = self._mmlu(name, root)
            elif file := offline.find_split(self.directories, [name], "test", bare=True):
                task = self._flat(name, file)
            else:
                task = self._from_hub(name)
        else:
            task = self._from_hub(name)
        for leaf in task.leaves.values():
            self._set_shots(leaf, task)
        return task

    def _local(self, name: str, root: Path) -> HarnessTask:
        rules = OFFLINE_TASKS[name]
        names, split = [name, *rules.names], rules.scored
        files = {split: offline.find_split(self.directories, names, split, bare=True)}
        if rules.shots:
            files[rules.shots] = offline.find_split(self.directories, names, rules.shots, bare=False)
        if files[split] is None:
            raise InputError(
                f"{name}: no file of its {split} split in {_listed(self.directories)}",
                f"looked for {', '.join(f'{n}.jsonl, {n}_{split}.jsonl, {n}/{split}.jsonl' for n in names)}"
                " and the same as .csv",
            )
        found = {key: file for key, file in files.items() if file is not None}
        first = first_row(found[split])
        if schema_of(rules.schemas, first) is None and offline.flat_task(found[split]):
            return self._flat(name, found[split])
        config = _config(root / rules.yaml, name, name, rules, found)
        return HarnessTask(name, _load(name, {name: config}), tuple(found.values()))

    def _mmlu(self, name: str, root: Path) -> HarnessTask:
        manager = _manager(root / MMLU_DIR)
        configs: dict[str, dict[str, Any]] = {}
        files: list[Path] = []
        missing: list[str] = []
        for leaf in _leaves(name, manager):
            subject = manager.task_index[leaf].cfg["dataset_name"]
            found = {split: offline.find_mmlu(self.directories, subject, split) for split in ("test", "dev")}
            if found["test"] is None:
                missing.append(subject)
                continue
            there = {split: file for split, file in found.items() if file is not None}
            configs[leaf] = _config(root / MMLU_DIR / f"{leaf}.yaml", leaf, "mmlu", MMLU, there)
            files += there.values()
        if missing:
            count = f"{len(missing)} of {len(missing) + len(configs)} subjects" if len(missing) > 1 else "a subject"
            raise InputError(
                f"{name}: {count} missing in {_listed(self.directories)}: {missing[0]}",
                f"looked for test/{missing[0]}_test.csv and {missing[0]}_test.csv, there and below mmlu/ and data/",
            )
        groups = [file for file in sorted((root / MMLU_DIR).glob("_*.yaml"))]
        return HarnessTask(name, _load(name, configs, groups), tuple(files))

    def _flat(self, name: str, file: Path) -> HarnessTask:
        found = offline.flat_task(file)
        if found is None:
            offline.load_rows(file, tuple(schema for schema, _ in offline.FLAT_TASKS))
            raise AssertionError("load_rows refuses what flat_task does not know")
        config = {
            "task": name,
            "dataset_path": str(file),
            "dataset_kwargs": {"offline_task": "flat", "files": {"test": str(file)}},
            "test_split": "test",
            "fewshot_split": "test",
            "metadata": {"version": 0},
            **found[1],
        }
        return HarnessTask(name, _load(name, {name: config}), (file,), f"as written in {file.name}")

    def _from_hub(self, name: str) -> HarnessTask:
        from lm_eval.tasks import TaskManager

        if self._hub is None and name.encode() in _task_files():
            self._hub = TaskManager()
        if self._hub is None or name not in self._hub.task_index:
            named = re.findall(rb"(?m)^\W?(?:task|group)\W?:\W*([\w.-]+)", _task_files())
            close = _close_names(name, {*(found.decode() for found in named), *OFFLINE_TASKS, *ALIASES})
            raise UsageError(
                f"--tasks {name}: no task of that name{close}",
                "known tasks are perplexity, wikitext2, kl, those of lm-eval, and files in --data-dir",
            )
        try:
            return HarnessTask(name, self._hub.load([name]))
        except (InputError, UsageError):
            raise
        except ImportError as error:
            raise _missing_package(name, error) from error
        except Exception as error:
            # The hub's libraries raise many kinds of errors; the fix is the same for all.
            reason = " ".join(str(error).split())
            raise InputError(
                f"{name}: its data set cannot be loaded ({type(error).__name__}: {reason[:200]})",
                "without a connection to the hub, --data-dir names local files",
            ) from error

    def _set_shots(self, leaf: Any, task: HarnessTask) -> None:
        """The number of examples, by lm-eval's rules."""
        own = leaf.get_config("num_fewshot")
        wanted = self.num_fewshot
        if wanted is not None and own == 0 and wanted != 0:
            self.warnings.append(f"{leaf.task_name} is always run without examples; --num-fewshot {wanted} is ignored")
            return
        count = wanted if wanted is not None else own or 0
        leaf.set_config(key="num_fewshot", value=count)
        if count and task.files and leaf.get_config("fewshot_split") is None and not leaf.has_training_docs():
            rules = MMLU if task.name.startswith("mmlu") else OFFLINE_TASKS[task.name]
            where = (
                f"come from its {rules.shots} split, which is not in --data-dir" if rules.shots else "are not defined"
            )
            fix = "give --num-fewshot 0" + (f", or add {leaf.task_name}_{rules.shots}.jsonl" if rules.shots else "")
            raise UsageError(f"{leaf.task_name}: its {count} examples {where}", fix)
        if count:
            # A question is never its own example.
            own_split = leaf.get_config("fewshot_split") == leaf.get_config("test_split")
            there = len(list(leaf.fewshot_docs())) - own_split
            if count > there:
                raise UsageError(f"--num-fewshot {count}: {leaf.task_name} has {there} examples")


@contextmanager
def needs_lm_eval(names: Sequence[str]) -> Iterator[None]:
    """Turn a missing lm-eval, or a package that it imports, into an error that names the tasks.

    Raises:
        MissingError: one is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        asked = f"--tasks {','.join(names)}"
        if (error.name or "").partition(".")[0] != "lm_eval":
            # A package that nobody has asked for: who wants it is said too.
            raise missing_package(error, asked, "eval") from error
        raise MissingError(f"{asked}: needs lm-eval, which is not installed", "pip install 'trirun[eval]'") from error


def _missing_package(task: str, error: ImportError) -> MissingError:
    """What to say where a task of lm-eval imports a package that trirun does not bring."""
    package = error.name and error.name.partition(".")[0]
    if package is None:  # lm-eval's own words, where it has caught the import
        return MissingError(f"--tasks {task}: packages are missing: {' '.join(str(error).split())[:200]}")
    return MissingError(f"--tasks {task}: lm-eval needs {package}, which is not installed", f"pip install {package}")


def tasks_root() -> Path:
    """The folder of lm-eval's own tasks. Raises ModuleNotFoundError where lm-eval is not installed."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


@cache
def _task_files() -> bytes:
    """The text of every task file of lm-eval. Reading takes 1 s, building lm-eval's index of them 5."""
    # Files that others include have names of any kind: _default_template_yaml, afriqa.
    other = {".py", ".pyc", ".md", ".json", ".jsonl", ".txt"}
    return b"\n".join(
        file.read_bytes() for file in tasks_root().rglob("*") if file.suffix not in other and file.is_file()
    )


def _close_names(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), 3)
    return f" (close: {', '.join(close)})" if close else ""


def _manager(*folders: Path) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=False)


def _config(source: Path, name: str, offline_task: str, rules: OfflineTask, files: dict[str, Path]) -> dict[str, Any]:
    """lm-eval's own task with its data set replaced, without the splits that have no file."""
    config: dict[str, Any] = {"include": str(source), "task": name, "dataset_name": None}
    config["dataset_path"] = str(files[rules.scored])
    config["dataset_kwargs"] = {
        "offline_task": offline_task,
        "files": {split: str(file) for split, file in files.items()},
    }
    for key, value in _own_splits(source).items():
        if value not in files:
            config[key] = None
    return config


def _own_splits(source: Path) -> dict[str, str]:
    from lm_eval.tasks._yaml_loader import load_yaml

    own = load_yaml(source, resolve_func=False)
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    return {key: own[key] for key in keys if own.get(key)}


def _load(name: str, configs: dict[str, dict[str, Any]], groups: Sequence[Path] = ()) -> Any:
    """Load tasks from generated YAML; lm-eval reads it and the data before this returns."""
    with tempfile.TemporaryDirectory(prefix="trirun-eval-") as folder:
        for task, config in configs.items():
            text = yaml.safe_dump(config, sort_keys=False)
            text += "custom_dataset: !function trirun_cli.eval.tasks.offline.local_dataset\n"
            (Path(folder) / f"{task}.yaml").write_text(text, encoding="utf-8")
        for group in groups:
            (Path(folder) / group.name).write_text(yaml.safe_dump({"include": str(group)}), encoding="utf-8")
        return _manager(Path(folder)).load([name])


def _leaves(name: str, manager: Any) -> list[str]:
    """The subjects in a task or group of lm-eval's mmlu family."""
    entry = manager.task_index.get(name)
    if entry is None:
        raise UsageError(f"--tasks {name}: no task of that name{_close_names(name, manager.all_tasks)}")
    members = entry.tags if entry.yaml_path is None else entry.cfg.get("task")
    if isinstance(members, str):
        return [name]
    return [leaf for member in sorted(members) for leaf in _leaves(member, manager)]


def _listed(directories: Sequence[Path]) -> str:
    return ", ".join(map(str, directories))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
