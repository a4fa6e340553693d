"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import TrirunError
from .constraint import AtLeast, Constraint
from .sampling import SamplingParams, Token

if TYPE_CHECKING:
    import numpy as np


Pooling = Literal["mean", "last"]


class QueueFull(TrirunError):
    """The engine holds as many requests as it may; one can be submitted again later."""


class EngineStopped(TrirunError):
    """The engine is closed, or its runner has failed; it takes no more requests."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: unique among the requests that the engine holds.
        prompt: token ids, at least one.
        stop_ids: token ids that end the text; the one met is not part of it.
        constraint: begins what says which tokens may come; None where any may.
        pooling: nothing is generated; the prompt's hidden states are wanted, their mean or the last one.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    constraint: Callable[[], Constraint] | None = None
    pooling: Pooling | None = None

    def constrained(self, generated: Iterable[int]) -> Constraint | None:
        """What says which tokens may come after those ``generated``; None where any may."""
        constraint, least = self.constraint and self.constraint(), self.params.min_tokens
        if least and self.stop_ids and not self.params.ignore_stop_ids:
            constraint = AtLeast(least, self.stop_ids, constraint)
        if constraint is not None:
            for token in generated:
                constraint.advance(token)
        return constraint


class FinishReason(StrEnum):
    """Why a request ended: a stop id; max_tokens or the context's end; abort(); a failed runner or no finite logits."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took. Seconds count from its submission.

    Attributes:
        prompt_tokens, generated_tokens: its tokens; a stop id is not one.
        reused_tokens: prompt tokens whose keys and values were in the cache already.
        queued_s: until it was given a slot. first_token_s: until its first token. total_s: until it ended.
    """

    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    queued_s: float
    first_token_s: float
    total_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first; 0 when there was only one."""
        seconds = self.total_s - self.first_token_s
        return (self.generated_tokens - 1) / seconds if seconds > 0 and self.generated_tokens > 1 else 0.0


# A tuple, as :class:`~.sampling.Token` is: a step makes one for every sequence.
class Event(NamedTuple):
    """News of one request. The last one of a request, and no other, has ``finish``.

    Attributes:
        tokens: new ones, in order. error: the message, where ``finish`` is ERROR.
        prompt_logprobs: once, where they are asked for: a token per prompt token, the first without a probability.
        usage: until now, with the first tokens and with the end.
        embedding: float32 [hidden], at the end, where pooling was asked for.
    """

    request_id: str
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[Token, ...] | None = None
    usage: Usage | None = None
    embedding: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands, and its totals since it was made.

    Attributes:
        running, waiting: requests now. cache_usage: share of the cache that running requests use, 0 to 1.
        prompt_tokens: of requests that have a slot or had one; reused_tokens of them were in the cache.
        generated_tokens: delivered. steps: run. preemptions: requests that lost their slot for lack of room.
        finished: requests that ended, by reason.
    """

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
    finished: dict[FinishReason, int]


Sink = Callable[[Event], None]
