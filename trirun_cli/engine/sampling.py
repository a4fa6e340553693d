"""From logits to the next token: what may be asked for.

``backends/cpu/sampler.py`` does it in numpy, ``backends/cuda/sampler.py`` on the GPU behind the model's own kernels.
Both draw by inverting the cumulative distribution over ascending token ids at one number per token, which depends on
the seed and the token's index alone: a request's text is the same whatever else is in its batch, and goes on the same
after a preemption.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import inf
from typing import NamedTuple, TypeVar

from ..errors import UsageError

# What is wrong where a token's id is -1.
NOT_FINITE = "the model's logits are not finite numbers: a weight is damaged, or the precision too low"
_MASK = 2**64 - 1
_Made = TypeVar("_Made", bound=tuple)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Penalties and bias change the logits first; then temperature, top-k, top-p and min-p, in this order, each on what
    the one before has left.

    Attributes:
        max_tokens: the most tokens to generate, at least 0. min_tokens: the fewest: no stop id is chosen before, and no
            stop string looked for, unless the context ends or a grammar allows nothing else.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities add up to at least p (nucleus sampling,
            Holtzman et al. 2020); 1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest (Nguyen et al. 2024); 0 keeps all.
        seed: of the random numbers; None draws a fresh one.
        stop: strings that end the text; they are not part of it. Whoever turns tokens into text looks for them.
        presence_penalty: subtracted from the logits of tokens generated before; frequency_penalty: that many times as
            often as they were (both as in OpenAI's interface).
        repetition_penalty: logits of tokens in the prompt or generated before are divided by it where positive,
            multiplied where negative (Keskar et al. 2019); 1 is none.
        logit_bias: added to the logits of these token ids.
        logprobs: report each token's log-probability, and those of this many likeliest tokens, under the model's own
            distribution, before anything above; None reports nothing. prompt_logprobs: the same of the prompt's tokens.
        ignore_stop_ids: generate on after a stop id.

    Raises:
        UsageError: a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_stop_ids: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        limits = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens, {self.max_tokens}"),
            ("temperature", 0 <= self.temperature < inf, "a finite number of at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed <= _MASK, "from 0 to 2**64 - 1"),
            ("stop", all(self.stop), "without empty strings"),
            ("presence_penalty", -inf < self.presence_penalty < inf, "a finite number"),
            ("frequency_penalty", -inf < self.frequency_penalty < inf, "a finite number"),
            # Beyond, a product with a logit leaves float32.
            ("repetition_penalty", 1e-4 <= self.repetition_penalty <= 1e4, "from 0.0001 to 10000"),
            ("logit_bias", all(-inf < bias < inf for bias in self.logit_bias.values()), "finite numbers"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "at least 0"),
        )
        for name, holds, rule in limits:
            if not holds:
                raise UsageError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias apply."""
        return self.penalizes or bool(self.logit_bias)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty applies."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


# A dataclass that is frozen takes twice as long to make, and a small model on a CPU makes one in 0.1 ms.
class Token(NamedTuple):
    """A token, its log-probability where asked for, and the likeliest ones (id, log-probability), likeliest first. Its
    id is -1 where the logits were not finite."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def plain_tokens(ids: Iterable[int]) -> list[Token]:
    """Tokens of which only the ids are known."""
    return each_made(Token, zip(ids, repeat(None), repeat(()), strict=False))


def each_made(kind: type[_Made], fields: Iterable[tuple]) -> list[_Made]:
    """Named tuples of these fields, made without a call of Python for each: a step makes hundreds."""
    return list(map(partial(tuple.__new__, kind), fields))


def stream_of(seed: int | None) -> int:
    """Where the random numbers of a seed begin; None begins anywhere."""
    return secrets.randbits(64) if seed is None else _mix(seed)


def uniform(stream: int, index: int) -> float:
    """The number in [0, 1) that chooses token ``index`` of a generation: SplitMix64 (Steele et al. 2014), which gives
    any number of its sequence without those before it."""
    return (_mix(stream + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
