"""The results of an evaluation as a JSON document, and question by question."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trirun_kernels.weights.durable import publish_file

from ..errors import InputError
from .candidate import Candidate
from .comparison import Difference, compare, perplexity_ratio
from .session import Evaluation
from .tasks.harness import seeds
from .tasks.scores import TaskScore

SCHEMA = "eval/2"


class Report:
    """An evaluation, with the comparison of its two models.

    Args:
        evaluation: of one or two models.

    Attributes:
        baseline, candidate: the models of ``--model`` and ``--checkpoint``, or None.
        differences: candidate minus baseline, in lm-eval's tasks.
        ratios: of perplexities, candidate over baseline, with standard errors, by task.

    Raises:
        InputError: the two models got different questions.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.baseline, self.candidate = evaluation.candidate("model"), evaluation.candidate("checkpoint")
        self.differences: list[Difference] = []
        self.ratios: dict[str, tuple[float, float | None]] = {}
        if self.baseline and self.candidate:
            for name, found in self.baseline.perplexities.items():
                self.ratios[name] = perplexity_ratio(found, self.candidate.perplexities[name])
            for name, run in self.baseline.runs.items():
                self.differences += compare(run.scores, self.candidate.runs[name].scores)

    def document(self) -> dict[str, Any]:
        """The JSON document, of schema ``trirun.eval/2``.

        ``results`` has an object for each model and task, with each metric under its name and its standard error under
        ``<metric>_stderr``; ``differences`` has one for each task and metric where there are two models.
        """
        settings = asdict(self.evaluation.settings)
        python, other = seeds(self.evaluation.settings.seed)
        return {
            "versions": self.evaluation.versions,
            "settings": {name: _plain(value) for name, value in settings.items()},
            "seeds": {"python": python, "numpy": other, "torch": other, "fewshot": other},
            "models": {each.role: each.facts | {"time": _times(each)} for each in self.evaluation.candidates},
            "data": {
                **{name: {"name": c.name, "sha256": c.sha256} for name, c in self.evaluation.corpora.items()},
                **{name: {"prompts": t.prompts, "files": t.data()} for name, t in self.evaluation.tasks.items()},
            },
            "results": [entry for each in self.evaluation.candidates for entry in self._results(each)],
            "differences": [asdict(difference) for difference in self.differences],
            "wall_s": round(self.evaluation.wall_s, 3),
        }

    def _results(self, each: Candidate) -> Iterable[dict[str, Any]]:
        common = {"role": each.role, "path": str(each.path), "engine": each.facts["engine"]}
        for name, found in each.perplexities.items():
            ratio, ratio_stderr = self.ratios.get(name, (None, None)) if each.role == "checkpoint" else (None, None)
            yield common | {
                "task": name,
                "metrics": ["perplexity", "nll"],
                "perplexity": found.value,
                "perplexity_stderr": found.value_stderr,
                "nll": found.nll,
                "nll_stderr": found.stderr,
                "windows": found.windows,
                "window": found.window,
                "tokens": found.tokens,
                "ratio": ratio,
                "ratio_stderr": ratio_stderr,
            }
        for run in each.runs.values():
            for score in run.scores:
                yield common | _entry(score)
        if each.role == "checkpoint" and (kl := self.evaluation.divergence):
            yield common | {
                "task": "kl",
                "metrics": ["kl", "same_top", "rms_probability"],
                "kl": kl.mean,
                "kl_stderr": kl.stderr,
                "percentiles": {f"{level:g}": value for level, value in kl.percentiles.items()},
                "maximum": kl.maximum,
                "same_top": kl.same_top,
                "same_top_stderr": kl.same_top_stderr,
                "rms_probability": kl.rms_probability,
                "windows": kl.windows,
                "window": kl.window,
                "tokens": kl.tokens,
            }

    def write_samples(self, folder: Path) -> None:
        """Write a JSON-lines file for each model and task, ROLE/TASK.jsonl, with a line for each question or window.

        Raises:
            InputError: the files cannot be written.
        """
        for each in self.evaluation.candidates:
            for name, found in each.perplexities.items():
                entries = [{"window": number, "nll": loss} for number, loss in enumerate(found.losses)]
                _write_lines(folder / each.role / f"{name}.jsonl", entries)
            for run in each.runs.values():
                for score in run.scores:
                    if not score.parts:
                        _write_lines(folder / each.role / f"{score.name}.jsonl", map(asdict, score.samples))


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; devices and pipes are written directly.

    Raises:
        InputError: it cannot be written.
    """
    special = path.exists() and not path.is_file()
    partial = path if special else path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        if not special:
            publish_file(partial, path)
    except BaseException as error:
        with suppress(OSError):
            if not special:
                partial.unlink()
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{path}: {error.strerror}") from error


def _write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(entry, ensure_ascii=False, default=str) + "\n" for entry in entries))


def _entry(score: TaskScore) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "task": score.name,
        "metrics": list(score.scores),
        "version": score.version,
        "num_fewshot": score.num_fewshot,
        "questions": score.questions,
        "of": score.of,
        "parts": score.parts,
    }
    for metric, value in score.scores.items():
        entry |= {metric: value, f"{metric}_stderr": score.stderrs[metric]}
    return entry


def _times(candidate: Candidate) -> dict[str, dict[str, float]]:
    return {
        task: {"wall_s": round(wall, 3), "model_s": round(candidate.model_s[task], 3)}
        for task, wall in candidate.wall_s.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
