"""A request inside the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .constraint import NOTHING_ALLOWED
from .request import FinishReason, Request, Sink, Usage
from .sampling import NOT_FINITE, Token

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine.

    Attributes:
        tokens: the prompt and what was generated and collected. limit: most tokens to generate.
        slot: where it runs, −1 while it waits.
        turn: counts its slots; a step launched in an earlier turn is of no account any more.
        prefill: tokens known when it was given its slot; needed: those of them to run before decoding begins.
        computed: tokens that launched steps have run; sampled: tokens that launched steps sample.
        pooled: float64 [hidden], the sum of the hidden states known, or the last one; of pooled_rows tokens.
        wants_scores: log-probabilities of the prompt are still to be computed; scores: those known.
    """

    request: Request
    sink: Sink
    limit: int
    submitted: float
    tokens: list[int]
    wants_scores: bool
    slot: int = -1
    turn: int = 0
    prefill: int = 0
    needed: int = 0
    computed: int = 0
    sampled: int = 0
    reused: int = 0
    started: float = 0.0
    first_token: float = 0.0
    scores: list[Token] = field(default_factory=list)
    pooled: np.ndarray | None = None
    pooled_rows: int = 0

    @classmethod
    def of(cls, request: Request, sink: Sink, context: int) -> Sequence:
        """A request that comes in now, to a model of that context."""
        limit = 0 if request.pooling else min(request.params.max_tokens, context - len(request.prompt))
        wants_scores = request.params.prompt_logprobs is not None
        return cls(request, sink, limit, time.perf_counter(), list(request.prompt), wants_scores)

    @property
    def generated(self) -> int:
        """Tokens generated and collected."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def no_token(self) -> str:
        """What it means that no token could be sampled, for people."""
        return NOT_FINITE if self.request.constraint is None else NOTHING_ALLOWED

    def take(self, tokens: tuple[Token, ...]) -> tuple[tuple[Token, ...], FinishReason | None]:
        """Take in sampled tokens; those of them that are text, and why it ends with them, or None."""
        # A burst takes no step after one that brings a stop id, or no token at all.
        later, request, known = len(tokens) - 1, self.request, self.tokens
        last, reason = tokens[later].id, None
        if later:
            self.computed += later
            self.sampled += later
            known += [token.id for token in tokens[:later]]
        if last < 0:
            tokens, reason = tokens[:later], FinishReason.ERROR
        elif last in request.stop_ids and not request.params.ignore_stop_ids:
            tokens, reason = tokens[:later], FinishReason.STOP
        else:
            known.append(last)
        if reason is None and len(known) - len(request.prompt) == self.limit:
            reason = FinishReason.LENGTH
        return tokens, reason

    def take_scores(self, scores: tuple[Token, ...]) -> tuple[Token, ...] | None:
        """Take in log-probabilities of more prompt tokens; all of them, once, when they are complete."""
        if not self.wants_scores:
            return None
        self.scores.extend(scores)
        prompt = self.request.prompt
        if len(self.scores) < len(prompt) - 1:
            return None
        self.wants_scores = False
        return (Token(prompt[0]), *self.scores)

    def pool(self, states: np.ndarray) -> np.ndarray | None:
        """Take in hidden states of more prompt tokens; float32 [hidden], their mean or the last, when all are there."""
        self.pooled_rows += len(states)
        if self.request.pooling == "mean":
            more = states.sum(axis=0, dtype="float64")
            self.pooled = more if self.pooled is None else self.pooled + more
        else:
            self.pooled = states[-1]
        if self.pooled_rows < len(self.request.prompt):
            return None
        count = self.pooled_rows if self.request.pooling == "mean" else 1
        return (self.pooled / count).astype("float32")

    def usage(self) -> Usage:
        """What it took until now."""
        now = time.perf_counter()
        started, first = self.started or now, self.first_token or now
        return Usage(
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            reused_tokens=self.reused,
            queued_s=started - self.submitted,
            first_token_s=first - self.submitted,
            total_s=now - self.submitted,
        )
