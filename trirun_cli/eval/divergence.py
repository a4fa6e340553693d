"""Kullback-Leibler divergence of a candidate's predictions from its baseline's, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy
import torch
from torch import Tensor

from ..engine.likelihoods import ResultCache
from ..engine.scoring import ScoringModel
from ..errors import InputError
from .perplexity import check_window
from .standard_errors import stderr_of_mean

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
# Rows of logits compared at a time: 64 of a vocabulary of 128 k are 64 MiB in float64.
ROWS = 64


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of the candidate's next-token distributions from the baseline's, in nats.

    Attributes:
        mean, stderr: over all tokens; the standard error is over windows, as the tokens of one depend on each other.
        percentiles: of the tokens' divergences, by percentage. maximum: of these.
        same_top, same_top_stderr: share of tokens at which both models find the same next token most likely.
        rms_probability: root mean square of the change in the true next token's probability.
        tokens, windows, window: compared tokens and windows, and the length of a window.
    """

    mean: float
    stderr: float | None
    percentiles: dict[float, float]
    maximum: float
    same_top: float
    same_top_stderr: float | None
    rms_probability: float
    tokens: int
    windows: int
    window: int


def divergence(
    baseline: ScoringModel,
    candidate: ScoringModel,
    windows: Tensor,
    *,
    cache: ResultCache | None = None,
    on_window: Callable[[], None] = lambda: None,
) -> Divergence:
    """Compare two models over windows int64 [windows, window], predicting every token but each window's first.

    Args:
        cache: of finished windows. on_window: called after each.

    Raises:
        UsageError: a window does not fit a context. InputError: the vocabularies differ.
    """
    count, window = windows.shape
    check_window(baseline, window)
    check_window(candidate, window)
    if baseline.vocab_size != candidate.vocab_size:
        raise InputError(f"vocabularies of {baseline.vocab_size} and {candidate.vocab_size} tokens cannot be compared")
    divergences, same, squares = [], [], []
    for tokens in windows:
        key = tokens.tolist()
        found = cache.get("divergence", key) if cache else None
        if found is None:
            found = _window(baseline, candidate, tokens)
            if cache:
                cache.put("divergence", key, value=found)
        divergences.append(found[0])
        same.append(found[1])
        squares.append(found[2])
        on_window()
    every = torch.tensor(divergences, dtype=torch.float64).flatten()
    # Unlike numpy's, torch's quantile takes at most 16 million values.
    quantiles = numpy.quantile(every.numpy(), [level / 100 for level in PERCENTILES])
    return Divergence(
        float(every.mean()),
        stderr_of_mean([fmean(values) for values in divergences]),
        dict(zip(PERCENTILES, quantiles.tolist(), strict=True)),
        float(every.max()),
        fmean(same),
        stderr_of_mean(same),
        math.sqrt(fmean(squares)),
        every.numel(),
        count,
        window,
    )


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference ‖ other) of next-token distributions, float64 [m] nats, from logits [m, vocab]; never below 0."""
    p, q = (logits.double().log_softmax(-1) for logits in (reference, other))
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def _window(baseline: ScoringModel, candidate: ScoringModel, tokens: Tensor) -> tuple[list[float], float, float]:
    """Divergence at each token, share of equal top tokens, mean squared change of the true token's probability."""
    logits = []
    for model in (baseline, candidate):
        model.reset()
        logits.append(model.forward(tokens, last_only=False)[:-1])
    reference, other = logits[0], logits[1].to(logits[0].device)
    truth = tokens[1:].to(reference.device).unsqueeze(1)
    values, same, squares = [], 0, 0.0
    for start in range(0, len(reference), ROWS):
        a, b, right = (part[start : start + ROWS] for part in (reference, other, truth))
        values += kl_divergence(a, b).tolist()
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        change = b.softmax(-1).gather(1, right) - a.softmax(-1).gather(1, right)
        squares += float(change.double().square().sum())
    return [float(f"{value:.6g}") for value in values], same / len(values), squares / len(values)
