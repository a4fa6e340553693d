"""Offline tasks: lm-eval's own tasks over local data files, without a hub.

An offline task is a task of lm-eval with its data set replaced by files found in ``--data-dir``. The template, few-shot
rules and metrics stay lm-eval's own, because the generated YAML includes lm-eval's file. A file of flat rows (see
:mod:`.row_schemas`) that is of no offline task becomes a task by itself, with its prompts as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from . import row_schemas
from .row_schemas import RowSchema
from .rows import SUFFIXES, Row, first_row, read_rows

# Names of the splits in file names.
SPLITS = {"test": ("test",), "validation": ("validation", "valid", "val", "dev"), "train": ("train",), "dev": ("dev",)}


@dataclass(frozen=True, slots=True)
class OfflineTask:
    """One of lm-eval's tasks that runs on local files.

    Attributes:
        yaml: the task's file, in lm-eval's folder of tasks.
        scored: the split whose questions are scored. shots: the split of the few-shot examples, if any.
        schemas: of its rows, the first that fits applies. names: of its files, besides the task's own.
    """

    yaml: str
    scored: str
    shots: str | None
    schemas: tuple[RowSchema, ...]
    names: tuple[str, ...] = ()


def _schema(convert: Any, *columns: str) -> RowSchema:
    return RowSchema(frozenset(columns), convert)


_FLAT = ("query", "choices", "gold")
_ARC = (
    _schema(row_schemas.arc_flat, *_FLAT),
    _schema(row_schemas.arc_hub, "question", "choices", "answerKey"),
    _schema(row_schemas.arc_original, "question", "answerKey"),
)
OFFLINE_TASKS = {
    "arc_challenge": OfflineTask("arc/arc_challenge.yaml", "test", "train", _ARC, ("ARC-Challenge",)),
    "arc_easy": OfflineTask("arc/arc_easy.yaml", "test", "train", _ARC, ("ARC-Easy",)),
    "boolq": OfflineTask(
        "super_glue/boolq/default.yaml",
        "validation",
        "train",
        (_schema(row_schemas.boolq_flat, *_FLAT), _schema(row_schemas.boolq, "passage", "question")),
    ),
    "gsm8k": OfflineTask(
        "gsm8k/gsm8k.yaml",
        "test",
        "train",
        (
            _schema(row_schemas.gsm8k_flat, "context", "chain_of_thought", "answer"),
            _schema(row_schemas.gsm8k, "question", "answer"),
        ),
    ),
    "hellaswag": OfflineTask(
        "hellaswag/hellaswag.yaml",
        "validation",
        "train",
        (_schema(row_schemas.hellaswag, "ctx_a", "endings", "label"),),
    ),
    "lambada_openai": OfflineTask(
        "lambada/lambada_openai.yaml",
        "test",
        None,
        (_schema(row_schemas.lambada_flat, "context", "continuation"), _schema(row_schemas.lambada, "text")),
        ("lambada",),
    ),
    "openbookqa": OfflineTask(
        "openbookqa/openbookqa.yaml",
        "test",
        "train",
        (
            _schema(row_schemas.openbookqa_flat, *_FLAT),
            _schema(row_schemas.openbookqa_hub, "question_stem", "choices", "answerKey"),
            _schema(row_schemas.arc_original, "question", "answerKey"),
        ),
        ("openbook_qa",),
    ),
    "piqa": OfflineTask(
        "piqa/piqa.yaml",
        "validation",
        "train",
        (_schema(row_schemas.piqa_flat, *_FLAT), _schema(row_schemas.piqa, "goal", "sol1", "sol2", "label")),
    ),
    "social_iqa": OfflineTask(
        "siqa/siqa.yaml",
        "validation",
        "train",
        (_schema(row_schemas.social_iqa, "context", "answerA", "answerB", "answerC", "label"),),
    ),
    "winogrande": OfflineTask(
        "winogrande/default.yaml",
        "validation",
        "train",
        (
            _schema(row_schemas.winogrande_flat, "context_options", "continuation", "gold"),
            _schema(row_schemas.winogrande, "sentence", "option1", "option2", "answer"),
        ),
    ),
}
# lm-eval knows these by the name on the right.
ALIASES = {"lambada": "lambada_openai", "openbook_qa": "openbookqa"}

MMLU_DIR = "mmlu/default"
MMLU = OfflineTask(
    MMLU_DIR,
    "test",
    "dev",
    (
        _schema(row_schemas.mmlu_numbered, "question", "choice0", "choice3", "answer"),
        _schema(row_schemas.mmlu_hub, "question", "choices", "answer"),
        _schema(row_schemas.mmlu_original, *row_schemas.MMLU_COLUMNS),
    ),
)

# Tasks that are a file of flat rows: their schema, and the task's definition for lm-eval.
FLAT_TASKS: tuple[tuple[RowSchema, dict[str, Any]], ...] = (
    (
        _schema(row_schemas.flat_choices, *_FLAT),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    ),
    (
        _schema(row_schemas.flat_contexts, "context_options", "continuation", "gold"),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "context_options",
            "doc_to_target": "continuation",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    (
        _schema(row_schemas.flat_continuation, "context", "continuation"),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "context",
            "doc_to_target": "{{' ' + continuation}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    ),
)
_FLAT_SCHEMAS = tuple(schema for schema, _ in FLAT_TASKS)


def find_split(directories: Sequence[Path], names: Iterable[str], split: str, *, bare: bool) -> Path | None:
    """The file of a task's split: NAME_SPLIT.jsonl, NAME/SPLIT.jsonl, or, when ``bare``, NAME.jsonl; or .csv.

    Args:
        directories: searched in order; an entry may be the file itself.
        names: of the task. split: "test", "validation", "train" or "dev".
    """
    names = list(names)
    stems = [pattern.format(name, word) for name in names for word in SPLITS[split] for pattern in ("{}_{}", "{}/{}")]
    stems += [pattern.format(name) for name in names if bare for pattern in ("{}", "{0}/{0}")]
    for directory in directories:
        if directory.is_file():
            inside = str(directory.with_suffix(""))
            if directory.suffix in SUFFIXES and any(inside.endswith(f"/{stem}") for stem in stems):
                return directory
            continue
        for stem in stems:
            for suffix in SUFFIXES:
                if (file := directory / f"{stem}{suffix}").is_file():
                    return file
    return None


def find_mmlu(directories: Sequence[Path], subject: str, split: str) -> Path | None:
    """A subject's file, SPLIT/SUBJECT_SPLIT.csv (as the authors ship it) or SUBJECT_SPLIT.csv; or .jsonl; also one
    folder down, in ``mmlu`` or ``data``."""
    for directory in directories:
        for root in (directory, directory / "mmlu", directory / "data"):
            for stem in (f"{split}/{subject}_{split}", f"{subject}_{split}", f"{split}/{subject}"):
                for suffix in SUFFIXES:
                    if (file := root / f"{stem}{suffix}").is_file():
                        return file
    return None


def load_rows(path: Path, schemas: tuple[RowSchema, ...]) -> list[Row]:
    """The rows of a file, as lm-eval's task reads them.

    Raises:
        InputError: the file cannot be read, a row is malformed, or no schema fits its columns.
    """
    first = first_row(path)
    schema = row_schemas.schema_of(schemas, first)
    if schema is not None:
        return read_rows(path, schema.convert)
    headerless = next((each for each in schemas if each.convert is row_schemas.mmlu_original), None)
    if path.suffix == ".csv" and headerless is not None and len(first) == len(row_schemas.MMLU_COLUMNS):
        return read_rows(path, headerless.convert, row_schemas.MMLU_COLUMNS)
    wanted = " or ".join(", ".join(sorted(each.columns)) for each in schemas)
    raise InputError(f"{path}: its columns are {', '.join(first)}; wanted are {wanted}")


def flat_task(path: Path) -> tuple[RowSchema, dict[str, Any]] | None:
    """The schema of a file of flat rows and the task's definition for lm-eval, or None when its rows are not flat."""
    first = first_row(path)
    return next(((schema, config) for schema, config in FLAT_TASKS if schema.columns <= first.keys()), None)


def local_dataset(offline_task: str, files: dict[str, str], **metadata: Any) -> Any:
    """A task's data set as a DatasetDict; lm-eval calls this by its name in the generated YAML.

    Args:
        offline_task: a key of OFFLINE_TASKS, "mmlu", or "flat" for a file that is a task by itself.
        files: paths by split. metadata: ignored; lm-eval passes it.

    Raises:
        InputError: as :func:`load_rows`.
    """
    from datasets import Dataset, DatasetDict

    known = {name: task.schemas for name, task in OFFLINE_TASKS.items()} | {"mmlu": MMLU.schemas, "flat": _FLAT_SCHEMAS}
    schemas = known[offline_task]
    return DatasetDict({split: Dataset.from_list(load_rows(Path(path), schemas)) for split, path in files.items()})
