"""Two models on the same questions: differences, their paired standard errors, and where the answers part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..errors import InputError
from . import statistics
from .perplexity import Perplexity
from .tasks.harness import Sample, TaskScore, strata


@dataclass(frozen=True, slots=True)
class Difference:
    """Checkpoint minus model, in one metric of one task or group.

    Attributes:
        value: the difference; stderr: its standard error, the questions being the same on both sides.
        questions: how many. same_answers: of them, how many both models answer alike; None where nothing is chosen.
        largest_margin: among the others, the most that the model preferred its answer to the checkpoint's, in nats. At
            the size of rounding errors, the answers part only at ties. None where there is nothing to compare.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    questions: int
    same_answers: int | None
    largest_margin: float | None


def compare(model: Sequence[TaskScore], checkpoint: Sequence[TaskScore]) -> list[Difference]:
    """Differences in every metric of every task, in the model's order.

    Raises:
        InputError: the two were not asked the same questions, because their tokenizers or chat templates differ.
    """
    theirs = {score.name: score for score in checkpoint}
    ours = {score.name: score for score in model}
    found = []
    for score in model:
        other = theirs[score.name]
        pairs = [(ours[name], theirs[name]) for name in score.parts or [score.name]]
        questions = [pair for left, right in pairs for pair in _paired(score.name, left.samples, right.samples)]
        same, margin = _agreement(questions)
        for metric, value in score.scores.items():
            stderr = _paired_stderr([left for left, _ in pairs], [right for _, right in pairs], metric)
            difference = other.scores[metric] - value
            found.append(Difference(score.name, metric, difference, stderr, len(questions), same, margin))
    return found


def perplexity_ratio(model: Perplexity, checkpoint: Perplexity) -> tuple[float, float | None]:
    """Checkpoint's perplexity over the model's, and its paired standard error over windows (delta method).

    Raises:
        InputError: the windows differ, because the tokenizers do.
    """
    if len(model.losses) != len(checkpoint.losses) or model.window != checkpoint.window:
        raise InputError("model and checkpoint cut the text into different windows; give --window")
    gaps = [right - left for left, right in zip(model.losses, checkpoint.losses, strict=True)]
    ratio = math.exp(fmean(gaps))
    stderr = statistics.stderr_of_mean(gaps)
    return ratio, None if stderr is None else ratio * stderr


def _paired(task: str, left: list[Sample], right: list[Sample]) -> list[tuple[Sample, Sample]]:
    pairs = list(zip(left, right, strict=True))
    if any(a.id != b.id or a.prompt != b.prompt for a, b in pairs):
        raise InputError(f"{task}: model and checkpoint got different prompts; do their chat templates differ?")
    return pairs


def _paired_stderr(model: list[TaskScore], checkpoint: list[TaskScore], metric: str) -> float | None:
    left, right = strata(model, metric), strata(checkpoint, metric)
    if left is None or right is None:
        return None
    gaps = [[b - a for a, b in zip(*both, strict=True)] for both in zip(left, right, strict=True)]
    return statistics.pooled_stderr(gaps)


def _agreement(pairs: list[tuple[Sample, Sample]]) -> tuple[int | None, float | None]:
    if not pairs or not isinstance(pairs[0][0].prediction, int | str):
        return None, None
    apart = [(a, b) for a, b in pairs if a.prediction != b.prediction]
    margins = [a.likelihoods[a.prediction] - a.likelihoods[b.prediction] for a, b in apart if len(a.likelihoods) > 1]
    return len(pairs) - len(apart), max(margins, default=None)
