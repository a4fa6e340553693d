"""A running model: how a batch is run and sampled from, what its logits are, how its key-value cache is shared out.

There is one interface to a running model, :class:`Runner`, with two faces. The engine steps requests through it:
``cache.admit`` and ``bind`` for a request's slot, then one :class:`Work` per step and slot through ``launch``, and
``cache.release`` when it ends. Scoring asks it for the logits of given tokens: ``logits`` and ``batch_logits``, see
:class:`.scoring.ScoringModel`. Both take their slots from the same cache, so one runner can do both by turns.

Whatever a runner does for these calls takes effect in the order of the calls (on a GPU: one stream), so a slot may be
given away while its last step is still on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from .request import Request
from .sampling import Token, each_made

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Work(NamedTuple):
    """One slot's share of a step.

    Attributes:
        slot: whose. position: how many tokens of the slot come before these; the slot forgets any beyond them.
        tokens: at least one; None is one token, the one sampled last for this slot, which may still be on the device.
        sample: choose the token after the last of them.
        targets: what follows the first ``len(targets)`` of them in the prompt; their log-probabilities are wanted,
            with the alternatives that ``request.params.prompt_logprobs`` asks for.
        states: the tokens' hidden states are wanted, and nothing else; of a runner with :attr:`Runner.has_states`.
    """

    slot: int
    position: int
    tokens: Sequence[int] | None
    sample: bool
    targets: Sequence[int] = ()
    states: bool = False

    @property
    def rows(self) -> int:
        """Tokens that it runs."""
        return 1 if self.tokens is None else len(self.tokens)


def next_tokens(slots: Iterable[int], positions: Iterable[int]) -> list[Work]:
    """Works that go on from the token sampled last, and sample the next."""
    constant = repeat(None), repeat(True), repeat(()), repeat(False)
    return each_made(Work, zip(slots, positions, *constant, strict=False))


class Outcome(NamedTuple):
    """What one :class:`Work` gave: the sampled token, the log-probabilities of its targets, of a burst the tokens
    sampled after the first, and hidden states, float32 [rows, hidden], after the last norm."""

    token: Token | None
    prompt: tuple[Token, ...] = ()
    more: tuple[Token, ...] = ()
    states: np.ndarray | None = None


def token_outcomes(tokens: Iterable[Token]) -> list[Outcome]:
    """One outcome per token, with nothing else in it."""
    return each_made(Outcome, zip(tokens, repeat(()), repeat(()), repeat(None), strict=False))


def in_order(work: Sequence[Work], states: Sequence[np.ndarray], others: Sequence[Outcome]) -> list[Outcome]:
    """One outcome per work: hidden states of those that want them, which ran apart, and what came of the others."""
    found, rest = iter(states), iter(others)
    return [Outcome(None, states=next(found)) if item.states else next(rest) for item in work]


class Pending(Protocol):
    """A step on its way."""

    def collect(self) -> Sequence[Outcome]:
        """Wait for it; one outcome per work, in order."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was over when it was launched."""

    outcomes: Sequence[Outcome]

    def collect(self) -> Sequence[Outcome]:
        """See :class:`Pending`."""
        return self.outcomes


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot, and how many of the prompt's tokens it already holds: fewer than the prompt has."""

    slot: int
    reused: int


class KvCache(Protocol):
    """Who owns which part of the key-value cache. Accounting only, on the host.

    A slot's tokens are its prompt and what was generated; ``reuse`` finds some of them computed by others.
    """

    def admit(self, prompt: Sequence[int], *, reuse: bool = True) -> Admission | None:
        """Room for a prompt, or None when there is none now; ``reuse`` False computes all of it anew."""

    def grow(self, slot: int, length: int) -> bool:
        """Room for a slot's first ``length`` tokens, before every step that computes some of them; False when there is
        none now."""

    def computed(self, slot: int, length: int) -> None:
        """A slot's first ``length`` tokens are computed by a step that has been launched; others may reuse those of
        its prompt from the next step on."""

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """Take back a slot that holds these tokens, all of them computed, for others to reuse."""

    @property
    def usage(self) -> float:
        """The share of the cache in use by running requests, 0 to 1."""


class Runner(Protocol):
    """A model on a device.

    Attributes:
        name: what runs it, for people: "native decoder on cpu, 2 threads".
        why_slower: why no faster backend runs this model, for people; empty where none does not.
        why_slots: why it has so many slots, for people; empty where the caller chose them.
        slots: sequences that can run at once. context: most tokens of one. max_rows: most tokens of one step, at least
            ``slots``. vocab_size: token ids are below it.
        prompt_rows: most tokens of prompts in a step in which others decode, who wait for it.
        lookahead: 1: the next step may be launched, with tokens=None, before this one is collected. 0: it may not.
        has_states: whether it gives hidden states.
        can_rewind: whether a slot can go back to a position before its last: not where a sliding window or a recurrent
            state has forgotten what it would go back to.
    """

    name: str
    why_slower: str
    why_slots: str
    slots: int
    context: int
    max_rows: int
    prompt_rows: int
    vocab_size: int
    lookahead: int
    can_rewind: bool
    has_states: bool

    @property
    def cache(self) -> KvCache:
        """Whose slots these are."""

    def prepare(self) -> None:
        """Make ready to sample: what takes time or memory once and scoring does not need, as CUDA graphs."""

    def bind(self, slot: int, request: Request, generated: Sequence[int]) -> None:
        """Give a slot to a request: the sampling state (random numbers, penalties, bias) is that of ``request.params``
        after the tokens ``generated``, which are not empty where a request was preempted and comes back."""

    def launch(self, work: Sequence[Work]) -> Pending:
        """Start a step, after :meth:`prepare`: slots in ascending order, each at most once, and at most ``max_rows``
        tokens in all."""

    def logits(self, slot: int, position: int, tokens: Sequence[int], keep: int) -> Tensor:
        """Append tokens to an admitted slot that holds ``position`` tokens, and forget what was beyond them.

        Args:
            tokens: m ids, at least one, in as many steps as they need. keep: from 1 to m.

        Returns:
            float32 logits [keep, vocab] after the last ``keep`` of them, on the runner's device.
        """

    def batch_logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """Run whole sequences of any lengths, at least one token each, and keep nothing of them.

        Returns:
            for each, float32 logits [keep_i, vocab] after its last ``keep_i`` tokens.
        """

    def close(self) -> None:
        """Give memory and devices back."""


@runtime_checkable
class BurstRunner(Protocol):
    """A runner without lookahead that can take several decoding steps in one launch, for models so small that a step
    costs no more than asking for it."""

    def burst(self, slots: Sequence[int], seconds: float) -> int:
        """Most steps that a launch of these slots should take to be over within that time, 1 when it should be an
        ordinary one."""

    def launch_burst(self, work: Sequence[Work], steps: int) -> Pending:
        """Start steps of work without tokens, which bring every slot that many tokens at most, and none after one that
        brought a slot's stop id."""
