"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        max_tokens: the most tokens to generate, at least 0.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities add up to at least p (nucleus sampling,
            Holtzman et al. 2020); 1 keeps all.
        seed: of the random generator; None draws a fresh one.
        stop: strings that end the text; they are not part of it.

    Raises:
        UsageError: a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limits = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("stop", all(self.stop), "without empty strings"),
        )
        for name, holds, rule in limits:
            if not holds:
                raise UsageError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def generator(self) -> torch.Generator:
        """The random state of one generation."""
        state = torch.Generator()
        if self.seed is None:
            state.seed()
        else:
            state.manual_seed(self.seed)
        return state


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token id from float logits [vocab]."""
    if params.temperature == 0:
        return int(logits.argmax())
    probabilities = token_probabilities(logits, params)
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def token_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled from: temperature, then top-k, then top-p, renormalised. [vocab] float32."""
    scaled = logits.float() / params.temperature
    if 0 < params.top_k < scaled.numel():
        threshold = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    probabilities = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays while the mass before it is below p, so that the first token always stays.
        outside = ordered.cumsum(-1) - ordered >= params.top_p
        probabilities[order[outside]] = 0
        probabilities /= probabilities.sum()
    return probabilities
