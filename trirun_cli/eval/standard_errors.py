"""Standard errors of scores and of the difference between two models on the same questions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, variance
from typing import Any

BOOTSTRAP = 1000


def influence(values: Sequence[Any], score: float) -> list[float] | None:
    """What each question adds to a score, to first order and up to a constant, or None for another kind of score.

    The score's standard error is that of the mean of these numbers (the delta method). The standard error of the
    difference between two models on the same questions is that of the mean of their differences.

    Args:
        values: one number per question. score: their mean, as of accuracy, or exp(−mean), as of perplexity.
    """
    if not values or not all(isinstance(value, int | float) for value in values):
        return None
    mean = fmean(values)
    if math.isclose(mean, score, rel_tol=1e-9, abs_tol=1e-12):
        return [float(value) for value in values]
    if abs(mean) < 700 and math.isclose(math.exp(-mean), score, rel_tol=1e-9):
        return [-score * value for value in values]
    return None


def stderr_of_mean(values: Sequence[float]) -> float | None:
    """Sample standard deviation over the square root of the count; None for fewer than two values."""
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else None


def pooled_stderr(strata: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all questions of several tasks, from the spread within each, as lm-eval pools it.

    Args:
        strata: the questions' numbers, by task. Fewer than one degree of freedom gives None.
    """
    total = sum(map(len, strata))
    free = total - len(strata)
    if free < 1:
        return None
    within = sum((len(values) - 1) * variance(values) for values in strata if len(values) > 1)
    return math.sqrt(within / free / total)


def group_stderr(strata: Sequence[Sequence[float]], score: float | None = None) -> float | None:
    """Standard error of a group's score, where that is the mean over all questions or the mean over tasks; else None.

    Args:
        strata: the questions' numbers, by task.
        score: None for differences between scores that are means over all questions.
    """
    every = [value for values in strata for value in values]
    if score is None or math.isclose(fmean(every), score, rel_tol=1e-9, abs_tol=1e-12):
        return pooled_stderr(strata)
    if math.isclose(fmean(map(fmean, strata)), score, rel_tol=1e-9, abs_tol=1e-12):
        errors = [stderr_of_mean(values) for values in strata]
        known = [error for error in errors if error is not None]
        return math.sqrt(sum(error**2 for error in known)) / len(known) if len(known) == len(errors) else None
    return None


def bootstrap_stderr(values: Sequence[Any], score: Callable[[list[Any]], float], seed: int) -> float | None:
    """Standard deviation of a score over resampled questions (Efron 1979), for scores that are no mean.

    Args:
        values: one per question, whatever ``score`` takes. seed: of the resampling.
    """
    if len(values) < 2:
        return None
    draw = random.Random(seed)
    scores = [float(score(draw.choices(values, k=len(values)))) for _ in range(BOOTSTRAP)]
    return math.sqrt(variance(scores))
