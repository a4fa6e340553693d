"""The results document, and the same results as tables, as markdown and question by question."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .comparison import Difference, compare, perplexity_ratio
from .session import Evaluation, Side
from .tasks.harness import TaskScore, seeds

SCHEMA = "eval/2"


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells; the first column names the row. ``detail`` rows are left out on a terminal."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: frozenset[int] = frozenset()

    @property
    def brief(self) -> list[Sequence[str]]:
        """The rows without the details."""
        return [row for number, row in enumerate(self.rows) if number not in self.detail]


class Report:
    """Everything that is shown of an evaluation.

    Raises:
        InputError: the models were not asked the same questions.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.model, self.checkpoint = evaluation.side("model"), evaluation.side("checkpoint")
        self.differences: list[Difference] = []
        self.ratios: dict[str, tuple[float, float | None]] = {}
        if self.model and self.checkpoint:
            for name, found in self.model.perplexities.items():
                self.ratios[name] = perplexity_ratio(found, self.checkpoint.perplexities[name])
            for name, run in self.model.runs.items():
                self.differences += compare(run.scores, self.checkpoint.runs[name].scores)

    def document(self) -> dict[str, Any]:
        """The JSON document, of schema ``trirun.eval/2``.

        ``results`` has one object for each model and task, with each metric under its name and its standard error under
        ``<metric>_stderr``; ``differences`` has one for each task and metric when there are two models.
        """
        settings = asdict(self.evaluation.settings)
        python, other = seeds(self.evaluation.settings.seed)
        return {
            "versions": self.evaluation.versions,
            "settings": {name: _plain(value) for name, value in settings.items()},
            "seeds": {"python": python, "numpy": other, "torch": other, "fewshot": other},
            "models": {side.role: side.facts | {"time": _times(side)} for side in self.evaluation.sides},
            "data": {
                **{name: {"name": c.name, "sha256": c.sha256} for name, c in self.evaluation.corpora.items()},
                **{name: {"prompts": t.prompts, "files": t.data()} for name, t in self.evaluation.tasks.items()},
            },
            "results": [entry for side in self.evaluation.sides for entry in self._results(side)],
            "differences": [asdict(difference) for difference in self.differences],
            "wall_s": round(self.evaluation.wall_s, 3),
        }

    def _results(self, side: Side) -> Iterable[dict[str, Any]]:
        common = {"role": side.role, "path": str(side.path), "engine": side.facts["engine"]}
        for name, found in side.perplexities.items():
            ratio, ratio_stderr = self.ratios.get(name, (None, None)) if side.role == "checkpoint" else (None, None)
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
        for run in side.runs.values():
            for score in run.scores:
                yield common | _entry(score)
        if side.role == "checkpoint" and (kl := self.evaluation.divergence):
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

    def tables(self) -> list[Table]:
        """One table for each text, one for lm-eval's tasks, one for the divergence, as far as they were run."""
        found = [self._perplexity_table(name) for name in self.evaluation.sides[0].perplexities]
        if self.evaluation.tasks:
            found.append(self._paired_table() if self.model and self.checkpoint else self._task_table())
        if self.evaluation.divergence:
            found.append(self._divergence_table())
        return found

    def _perplexity_table(self, name: str) -> Table:
        rows = []
        for side in self.evaluation.sides:
            found = side.perplexities[name]
            ratio = ""
            if name in self.ratios:
                ratio = _with_error(*self.ratios[name]) if side.role == "checkpoint" else "1"
            error = "–" if found.value_stderr is None else f"{found.value_stderr:.3f}"
            rows.append((str(side.path), f"{found.value:.3f}", error, ratio, str(found.tokens)))
        window = self.evaluation.sides[0].perplexities[name].window
        title = f"{name} of {self.evaluation.corpora[name].name}, windows of {window} tokens"
        return Table(title, ("model", "perplexity", "± (1 s.e.)", "ratio", "tokens"), rows)

    def _task_table(self) -> Table:
        rows: list[Sequence[str]] = []
        detail: set[int] = set()
        for score, part in _scores(self.evaluation.sides[0]):
            for metric, value in score.scores.items():
                if part:
                    detail.add(len(rows))
                error = _number(score.stderrs[metric])
                rows.append((score.name, _shots(score), metric, _number(value), error, f"{score.questions:,}"))
        columns = ("task", "n-shot", "metric", "value", "± (1 s.e.)", "questions")
        return Table(str(self.evaluation.sides[0].path), columns, rows, frozenset(detail))

    def _paired_table(self) -> Table:
        assert self.model and self.checkpoint
        differences = {(found.task, found.metric): found for found in self.differences}
        others = {score.name: score for score, _ in _scores(self.checkpoint)}
        rows: list[Sequence[str]] = []
        detail: set[int] = set()
        for score, part in _scores(self.model):
            other = others[score.name]
            for metric, value in score.scores.items():
                if part:
                    detail.add(len(rows))
                found = differences[score.name, metric]
                same = "" if found.same_answers is None else f"{found.same_answers:,} / {found.questions:,}"
                rows.append(
                    (
                        score.name,
                        _shots(score),
                        metric,
                        _with_error(value, score.stderrs[metric]),
                        _with_error(other.scores[metric], other.stderrs[metric]),
                        _with_error(found.value, found.stderr, sign=True),
                        same,
                    )
                )
        columns = ("task", "n-shot", "metric", "model", "checkpoint", "difference (paired s.e.)", "same answers")
        return Table(f"{self.model.path} and {self.checkpoint.path}", columns, rows, frozenset(detail))

    def _divergence_table(self) -> Table:
        kl = self.evaluation.divergence
        assert kl is not None
        rows = [
            ("KL divergence, mean", f"{kl.mean:.3g}" + ("" if kl.stderr is None else f" ± {kl.stderr:.2g}")),
            *((f"  {level:g} % of tokens below", f"{value:.3g}") for level, value in kl.percentiles.items()),
            ("  maximum", f"{kl.maximum:.3g}"),
            ("same top token", _with_error(kl.same_top, kl.same_top_stderr)),
            ("RMS change of the true token's probability", f"{kl.rms_probability:.3g}"),
            ("tokens", f"{kl.tokens:,}"),
        ]
        return Table(f"checkpoint against model, {self.evaluation.corpora['kl'].name}, nats", ("", "value"), rows)

    def markdown(self) -> str:
        """Every table, and what produced it, as GitHub's markdown."""
        lines = []
        for table in self.tables():
            lines += [f"### {table.title}", "", _row(table.columns), _row(["---", *["--:"] * (len(table.columns) - 1)])]
            lines += [*map(_row, table.rows), ""]
        for side in self.evaluation.sides:
            kernel = f", {side.facts['kernel']} kernels" if side.facts["kernel"] else ""
            lines.append(f"- {side.role}: `{side.path}` on {side.facts['engine']}{kernel}; BOS {side.facts['bos']}")
        versions = ", ".join(f"{name} {version}" for name, version in self.evaluation.versions.items())
        return "\n".join([*lines, f"- {versions}", ""])

    def write_samples(self, folder: Path) -> None:
        """One JSON-lines file for each model and task, ROLE/TASK.jsonl, with a line for each question or window.

        Raises:
            InputError: the files cannot be written.
        """
        for side in self.evaluation.sides:
            for name, found in side.perplexities.items():
                entries = [{"window": number, "nll": loss} for number, loss in enumerate(found.losses)]
                _write_lines(folder / side.role / f"{name}.jsonl", entries)
            for run in side.runs.values():
                for score in run.scores:
                    if not score.parts:
                        _write_lines(folder / side.role / f"{score.name}.jsonl", map(asdict, score.samples))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; a device or a pipe takes what it can and stays what it is.

    Raises:
        InputError: it cannot be written.
    """
    special = path.exists() and not path.is_file()
    partial = path if special else path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        if not special:
            partial.replace(path)
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


def _scores(side: Side) -> Iterable[tuple[TaskScore, bool]]:
    """Every score, with whether it is a mere part of a group."""
    for run in side.runs.values():
        parts = {name for score in run.scores for name in score.parts}
        for score in run.scores:
            yield score, score.name in parts


def _times(side: Side) -> dict[str, dict[str, float]]:
    return {
        name: {"wall_s": round(wall, 3), "model_s": round(side.model_s[name], 3)} for name, wall in side.wall_s.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _shots(score: TaskScore) -> str:
    return "" if score.num_fewshot is None else str(score.num_fewshot)


def _number(value: float | None, sign: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if sign else ''}.4f}"


def _with_error(value: float, stderr: float | None, *, sign: bool = False) -> str:
    return _number(value, sign) + ("" if stderr is None else f" ± {stderr:.4f}")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
