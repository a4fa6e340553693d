"""Offline task packs: lm-eval's own tasks over local data files, without a hub.

A pack is a task of lm-eval with its data set replaced by files found in ``--data-dir``. The task's template, few-shot
rules and metrics stay lm-eval's, word for word, because the generated YAML includes lm-eval's own file. A file of flat
rows (see :mod:`.forms`) that no pack knows becomes a task of its own, with the prompts as they stand in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..rows import SUFFIXES, Row, first_row, read_rows
from . import row_schemas as forms
from .row_schemas import Form

# Names a split goes by in file names.
SPLITS = {"test": ("test",), "validation": ("validation", "valid", "val", "dev"), "train": ("train",), "dev": ("dev",)}


@dataclass(frozen=True, slots=True)
class Pack:
    """One of lm-eval's tasks that runs on local files.

    Attributes:
        yaml: lm-eval's file of the task, below its folder of tasks.
        scored: the split whose questions count. shots: the split that few-shot examples come from, if any.
        kinds: forms its rows may have. names: of the files, besides the task's own.
    """

    yaml: str
    scored: str
    shots: str | None
    kinds: tuple[Form, ...]
    names: tuple[str, ...] = ()


def _form(convert: Any, *columns: str) -> Form:
    return Form(frozenset(columns), convert)


_FLAT = ("query", "choices", "gold")
_ARC = (
    _form(forms.arc_flat, *_FLAT),
    _form(forms.arc_hub, "question", "choices", "answerKey"),
    _form(forms.arc_original, "question", "answerKey"),
)
PACKS = {
    "arc_challenge": Pack("arc/arc_challenge.yaml", "test", "train", _ARC, ("ARC-Challenge",)),
    "arc_easy": Pack("arc/arc_easy.yaml", "test", "train", _ARC, ("ARC-Easy",)),
    "boolq": Pack(
        "super_glue/boolq/default.yaml",
        "validation",
        "train",
        (_form(forms.boolq_flat, *_FLAT), _form(forms.boolq, "passage", "question")),
    ),
    "gsm8k": Pack(
        "gsm8k/gsm8k.yaml",
        "test",
        "train",
        (
            _form(forms.gsm8k_flat, "context", "chain_of_thought", "answer"),
            _form(forms.gsm8k, "question", "answer"),
        ),
    ),
    "hellaswag": Pack(
        "hellaswag/hellaswag.yaml", "validation", "train", (_form(forms.hellaswag, "ctx_a", "endings", "label"),)
    ),
    "lambada_openai": Pack(
        "lambada/lambada_openai.yaml",
        "test",
        None,
        (_form(forms.lambada_flat, "context", "continuation"), _form(forms.lambada, "text")),
        ("lambada",),
    ),
    "openbookqa": Pack(
        "openbookqa/openbookqa.yaml",
        "test",
        "train",
        (
            _form(forms.openbookqa_flat, *_FLAT),
            _form(forms.openbookqa_hub, "question_stem", "choices", "answerKey"),
            _form(forms.arc_original, "question", "answerKey"),
        ),
        ("openbook_qa",),
    ),
    "piqa": Pack(
        "piqa/piqa.yaml",
        "validation",
        "train",
        (_form(forms.piqa_flat, *_FLAT), _form(forms.piqa, "goal", "sol1", "sol2", "label")),
    ),
    "social_iqa": Pack(
        "siqa/siqa.yaml",
        "validation",
        "train",
        (_form(forms.social_iqa, "context", "answerA", "answerB", "answerC", "label"),),
    ),
    "winogrande": Pack(
        "winogrande/default.yaml",
        "validation",
        "train",
        (
            _form(forms.winogrande_flat, "context_options", "continuation", "gold"),
            _form(forms.winogrande, "sentence", "option1", "option2", "answer"),
        ),
    ),
}
# lm-eval knows these by the name on the right.
ALIASES = {"lambada": "lambada_openai", "openbook_qa": "openbookqa"}

MMLU_DIR = "mmlu/default"
MMLU = Pack(
    MMLU_DIR,
    "test",
    "dev",
    (
        _form(forms.mmlu_numbered, "question", "choice0", "choice3", "answer"),
        _form(forms.mmlu_hub, "question", "choices", "answer"),
        _form(forms.mmlu_original, *forms.MMLU_COLUMNS),
    ),
)

# Tasks made of a file alone: its columns, and how lm-eval is to read them.
FLAT_TASKS: tuple[tuple[Form, dict[str, Any]], ...] = (
    (
        _form(forms.flat_choices, *_FLAT),
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
        _form(forms.flat_contexts, "context_options", "continuation", "gold"),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "gold",
            "doc_to_choice": "context_options",
            "doc_to_target": "continuation",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    (
        _form(forms.flat_continuation, "context", "continuation"),
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
_FLAT_FORMS = tuple(form for form, _ in FLAT_TASKS)


def find_split(directories: Sequence[Path], names: Iterable[str], split: str, *, bare: bool) -> Path | None:
    """The file of a task's split: NAME_SPLIT.jsonl, NAME/SPLIT.jsonl, or, when ``bare``, NAME.jsonl; or .csv.

    Args:
        directories: searched in order; a file in place of a directory stands for itself.
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


def load_rows(path: Path, kinds: tuple[Form, ...]) -> list[Row]:
    """The rows of a file, as lm-eval's task reads them.

    Raises:
        InputError: the file cannot be read, a row is malformed, or the columns are of no known form.
    """
    first = first_row(path)
    form = forms.form_of(kinds, first)
    if form is not None:
        return read_rows(path, form.convert)
    headerless = next((kind for kind in kinds if kind.convert is forms.mmlu_original), None)
    if path.suffix == ".csv" and headerless is not None and len(first) == len(forms.MMLU_COLUMNS):
        return read_rows(path, headerless.convert, forms.MMLU_COLUMNS)
    wanted = " or ".join(", ".join(sorted(kind.columns)) for kind in kinds)
    raise InputError(f"{path}: its columns are {', '.join(first)}; wanted are {wanted}")


def flat_task(path: Path) -> tuple[Form, dict[str, Any]] | None:
    """The form of a file of flat rows and how lm-eval is to read them, or None when its rows are of another kind."""
    first = first_row(path)
    return next(((form, config) for form, config in FLAT_TASKS if form.columns <= first.keys()), None)


def local_dataset(pack: str, files: dict[str, str], **metadata: Any) -> Any:
    """A task's data set, read when lm-eval asks for it.

    Args:
        pack: a key of PACKS, "mmlu", or "flat" for files that are tasks by themselves.
        files: split to path.

    Raises:
        InputError: as :func:`load_rows`.
    """
    from datasets import Dataset, DatasetDict

    kinds = MMLU.kinds if pack == "mmlu" else PACKS[pack].kinds if pack in PACKS else _FLAT_FORMS
    return DatasetDict({split: Dataset.from_list(load_rows(Path(path), kinds)) for split, path in files.items()})
