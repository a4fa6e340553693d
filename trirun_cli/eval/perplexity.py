"""Perplexity by the protocol of the GPTQ paper: non-overlapping windows of one long token stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.likelihoods import ResultCache
from ..engine.scoring import ScoringModel
from ..errors import InputError, UsageError
from .standard_errors import stderr_of_mean


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of every token but each window's first.

    Attributes:
        value: the perplexity.
        nll: mean negative log-likelihood in nats per token; stderr: its standard error over windows, None for one.
        windows, window, tokens: how many windows, their length, and the tokens predicted.
        losses: mean negative log-likelihood of each window.
    """

    value: float
    nll: float
    stderr: float | None
    windows: int
    window: int
    tokens: int
    losses: tuple[float, ...]

    @property
    def value_stderr(self) -> float | None:
        """Standard error of the perplexity (delta method); None for one window."""
        return None if self.stderr is None else self.value * self.stderr


def cut_windows(ids: list[int], window: int, limit: int | None = None) -> Tensor:
    """Non-overlapping windows int64 [windows, window] of a token stream; the rest at the end is dropped.

    Raises:
        InputError: the text is shorter than one window.
    """
    count = len(ids) // window
    if limit is not None:
        count = min(count, limit)
    if count == 0:
        raise InputError(f"the text has {len(ids)} tokens, less than one window of {window}")
    return torch.tensor(ids[: count * window]).view(count, window)


def check_window(model: ScoringModel, window: int) -> None:
    """Check a window's length against a model.

    Raises:
        UsageError: it is longer than the model's context or has fewer than two tokens.
    """
    if window < 2:
        raise UsageError(f"a window of {window} tokens has none to predict; at least 2")
    if window > model.max_positions:
        raise UsageError(f"a window of {window} tokens does not fit the context of {model.max_positions} (--ctx)")


def window_loss(model: ScoringModel, tokens: Tensor) -> float:
    """Mean negative log-likelihood, in nats, of a window int64 [window] without its first token."""
    model.reset()
    logits = model.forward(tokens, last_only=False)
    return F.cross_entropy(logits[:-1], tokens[1:].to(logits.device)).item()


def perplexity_of(losses: Iterable[float], window: int) -> Perplexity:
    """The perplexity of windows of equal length from the loss of each (Frantar et al. 2023, "GPTQ", §4)."""
    losses = tuple(losses)
    count = len(losses)
    nll = sum(losses) / count
    value = math.exp(nll) if nll < 709 else math.inf
    return Perplexity(value, nll, stderr_of_mean(losses), count, window, count * (window - 1), losses)


def perplexity(
    model: ScoringModel,
    windows: Tensor,
    *,
    cache: ResultCache | None = None,
    on_window: Callable[[float], None] = lambda model_s: None,
) -> Perplexity:
    """Perplexity of a model over windows int64 [windows, window].

    Args:
        cache: of finished windows. on_window: called after each window with its seconds in the model.

    Raises:
        UsageError: a window is longer than the model's context or has fewer than two tokens.
    """
    check_window(model, windows.shape[1])
    losses = []
    for tokens in windows:
        key, model_s = tokens.tolist(), 0.0
        loss = cache.get("window", key) if cache else None
        if loss is None:
            started = time.perf_counter()
            loss = window_loss(model, tokens)
            model_s = time.perf_counter() - started
            if cache:
                cache.put("window", key, value=loss)
        losses.append(loss)
        on_window(model_s)
    return perplexity_of(losses, windows.shape[1])
