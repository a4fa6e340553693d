"""Two models on the same questions: differences, paired standard errors, and how often the answers agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..errors import InputError
from . import standard_errors
from .perplexity import Perplexity
from .tasks.scores import Sample, TaskScore, strata


@dataclass(frozen=True, slots=True)
class Difference:
    """Candidate minus baseline, in one metric of one task or group.

    Attributes:
        value: the difference. stderr: its paired standard error, as both models get the same questions.
        questions: how many. same_answers: how many of them both models answer alike; None where no answer is chosen.
        largest_margin: among the others, by how many nats at most the baseline preferred its own answer to the
            candidate's. At the size of rounding errors, the answers differ only at ties. None where nothing differs.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int
    same_answers: int | None
    largest_margin: float | None


def compare(baseline: Sequence[TaskScore], candidate: Sequence[TaskScore]) -> list[Difference]:
    """Differences in every metric of every task, in the baseline's order.

    Raises:
        InputError: the models got different prompts, because their tokenizers or chat templates differ.
    """
    first = {score.name: score for score in baseline}
    second = {score.name: score for score in candidate}
    found = []
    for score in baseline:
        other = second[score.name]
        pairs = [(first[name], second[name]) for name in score.parts or [score.name]]
        questions = [pair for left, right in pairs for pair in _paired(score.name, left.samples, right.samples)]
        same, margin = _agreement(questions)
        for metric, value in score.scores.items():
            stderr = _paired_stderr([left for left, _ in pairs], [right for _, right in pairs], metric)
            difference = other.scores[metric] - value
            found.append(Difference(score.name, metric, difference, stderr, len(questions), same, margin))
    return found


def perplexity_ratio(baseline: Perplexity, candidate: Perplexity) -> tuple[float, float | None]:
    """The candidate's perplexity over the baseline's, and its paired standard error over windows (delta method).

    Raises:
        InputError: the windows differ, because the tokenizers do.
    """
    if len(baseline.losses) != len(candidate.losses) or baseline.window != candidate.window:
        raise InputError("model and checkpoint cut the text into different windows; give --window")
    gaps = [right - left for left, right in zip(baseline.losses, candidate.losses, strict=True)]
    ratio = math.exp(fmean(gaps))
    stderr = standard_errors.stderr_of_mean(gaps)
    return ratio, None if stderr is None else ratio * stderr


def _paired(task: str, left: list[Sample], right: list[Sample]) -> list[tuple[Sample, Sample]]:
    pairs = list(zip(left, right, strict=True))
    if any(a.id != b.id or a.prompt != b.prompt for a, b in pairs):
        raise InputError(f"{task}: model and checkpoint got different prompts; do their chat templates differ?")
    return pairs


def _paired_stderr(baseline: list[TaskScore], candidate: list[TaskScore], metric: str) -> float | None:
    left, right = strata(baseline, metric), strata(candidate, metric)
    if left is None or right is None:
        return None
    gaps = [[b - a for a, b in zip(*both, strict=True)] for both in zip(left, right, strict=True)]
    return standard_errors.pooled_stderr(gaps)


def _agreement(pairs: list[tuple[Sample, Sample]]) -> tuple[int | None, float | None]:
    if not pairs or not isinstance(pairs[0][0].prediction, int | str):
        return None, None
    apart = [(a, b) for a, b in pairs if a.prediction != b.prediction]
    margins = [a.likelihoods[a.prediction] - a.likelihoods[b.prediction] for a, b in apart if len(a.likelihoods) > 1]
    return len(pairs) - len(apart), max(margins, default=None)
