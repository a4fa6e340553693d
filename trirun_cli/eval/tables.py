"""The results of an evaluation as tables, for a terminal and as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .candidate import Candidate
from .report import Report
from .tasks.scores import TaskScore


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


def tables(report: Report) -> list[Table]:
    """One table for each text, one for lm-eval's tasks and one for the divergence, where they were run."""
    found = [_perplexity_table(report, name) for name in report.evaluation.candidates[0].perplexities]
    if report.evaluation.tasks:
        found.append(_paired_table(report) if report.baseline and report.candidate else _task_table(report))
    if report.evaluation.divergence:
        found.append(_divergence_table(report))
    return found


def _perplexity_table(report: Report, name: str) -> Table:
    rows = []
    for each in report.evaluation.candidates:
        found = each.perplexities[name]
        ratio = ""
        if name in report.ratios:
            ratio = _with_error(*report.ratios[name]) if each.role == "checkpoint" else "1"
        error = "–" if found.value_stderr is None else f"{found.value_stderr:.3f}"
        rows.append((str(each.path), f"{found.value:.3f}", error, ratio, str(found.tokens)))
    window = report.evaluation.candidates[0].perplexities[name].window
    title = f"{name} of {report.evaluation.corpora[name].name}, windows of {window} tokens"
    return Table(title, ("model", "perplexity", "± (1 s.e.)", "ratio", "tokens"), rows)


def _task_table(report: Report) -> Table:
    rows: list[Sequence[str]] = []
    detail: set[int] = set()
    for score, part in _scores(report.evaluation.candidates[0]):
        for metric, value in score.scores.items():
            if part:
                detail.add(len(rows))
            error = _number(score.stderrs[metric])
            rows.append((score.name, _shots(score), metric, _number(value), error, f"{score.questions:,}"))
    columns = ("task", "n-shot", "metric", "value", "± (1 s.e.)", "questions")
    return Table(str(report.evaluation.candidates[0].path), columns, rows, frozenset(detail))


def _paired_table(report: Report) -> Table:
    assert report.baseline and report.candidate
    differences = {(found.task, found.metric): found for found in report.differences}
    others = {score.name: score for score, _ in _scores(report.candidate)}
    rows: list[Sequence[str]] = []
    detail: set[int] = set()
    for score, part in _scores(report.baseline):
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
    return Table(f"{report.baseline.path} and {report.candidate.path}", columns, rows, frozenset(detail))


def _divergence_table(report: Report) -> Table:
    kl = report.evaluation.divergence
    assert kl is not None
    rows = [
        ("KL divergence, mean", f"{kl.mean:.3g}" + ("" if kl.stderr is None else f" ± {kl.stderr:.2g}")),
        *((f"  {level:g} % of tokens below", f"{value:.3g}") for level, value in kl.percentiles.items()),
        ("  maximum", f"{kl.maximum:.3g}"),
        ("same top token", _with_error(kl.same_top, kl.same_top_stderr)),
        ("RMS change of the true token's probability", f"{kl.rms_probability:.3g}"),
        ("tokens", f"{kl.tokens:,}"),
    ]
    return Table(f"checkpoint against model, {report.evaluation.corpora['kl'].name}, nats", ("", "value"), rows)


def markdown(report: Report) -> str:
    """Every table as GitHub's markdown, with what produced it."""
    lines = []
    for table in tables(report):
        lines += [f"### {table.title}", "", _row(table.columns), _row(["---", *["--:"] * (len(table.columns) - 1)])]
        lines += [*map(_row, table.rows), ""]
    for each in report.evaluation.candidates:
        kernel = f", {each.facts['kernel']} kernels" if each.facts["kernel"] else ""
        lines.append(f"- {each.role}: `{each.path}` on {each.facts['engine']}{kernel}; BOS {each.facts['bos']}")
    versions = ", ".join(f"{name} {version}" for name, version in report.evaluation.versions.items())
    return "\n".join([*lines, f"- {versions}", ""])


def _scores(candidate: Candidate) -> Iterable[tuple[TaskScore, bool]]:
    """Every score, and whether it is a part of a group."""
    for run in candidate.runs.values():
        parts = {name for score in run.scores for name in score.parts}
        for score in run.scores:
            yield score, score.name in parts


def _shots(score: TaskScore) -> str:
    return "" if score.num_fewshot is None else str(score.num_fewshot)


def _number(value: float | None, sign: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if sign else ''}.4f}"


def _with_error(value: float, stderr: float | None, *, sign: bool = False) -> str:
    return _number(value, sign) + ("" if stderr is None else f" ± {stderr:.4f}")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
