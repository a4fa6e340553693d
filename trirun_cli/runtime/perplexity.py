"""Perplexity by the protocol of the GPTQ paper: non-overlapping windows of one long token stream."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from .model import CausalLM


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of every token but each window's first.

    Attributes:
        value: the perplexity.
        nll: mean negative log-likelihood in nats per token; stderr: its standard error over windows.
        windows, window, tokens: how many windows, their length, and the tokens predicted.
    """

    value: float
    nll: float
    stderr: float
    windows: int
    window: int
    tokens: int


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


def perplexity(model: CausalLM, windows: Tensor, on_window: Callable[[], None] = lambda: None) -> Perplexity:
    """Perplexity of a model over windows int64 [windows, window] (Frantar et al. 2023, "GPTQ", §4).

    Raises:
        InputError: a window is longer than the model's context or has fewer than two tokens.
    """
    count, window = windows.shape
    if not 2 <= window <= model.max_positions:
        raise InputError(f"a window of {window} tokens does not fit a context of 2..{model.max_positions}")
    losses = []
    for tokens in windows:
        model.reset()
        logits = model.forward(tokens, last_only=False)
        losses.append(F.cross_entropy(logits[:-1], tokens[1:].to(logits.device)).item())
        on_window()
    nll = sum(losses) / count
    spread = math.sqrt(sum((loss - nll) ** 2 for loss in losses) / max(count - 1, 1) / count)
    return Perplexity(math.exp(nll), nll, spread, count, window, count * (window - 1))
