"""Sampling in numpy, a row at a time: on a CPU a token costs microseconds, and torch's calls alone would cost more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from ...engine.constraint import Constraint, mask_words
from ...engine.request import Request
from ...engine.sampling import SamplingParams, Token, stream_of, uniform

# A nucleus is looked for among tokens at least this likely, relative to the likeliest; the first are mostly enough.
_LIKELY = (2.0**-8, 2.0**-16, 0.0)
# Weights that are added up at once where one of more than 32 such blocks is drawn.
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token is drawn: by the temperature, top-k, top-p and min-p of ``params``, at a number of a stream."""

    params: SamplingParams
    stream: int
    index: int


@dataclass(slots=True)
class _State:
    """Of one slot: its stream of random numbers, how many tokens it has, and what it saw where penalties need it."""

    params: SamplingParams
    stream: int
    index: int
    counts: np.ndarray | None  # int32 [vocab], of generated tokens
    seen: np.ndarray | None  # bool [vocab], in the prompt or generated
    biased: tuple[np.ndarray, np.ndarray] | None  # ids int64 [b], biases float32 [b]
    constraint: Constraint | None
    mask: np.ndarray  # uint32 words: which tokens may come next, where masked
    masked: bool
    simple: bool  # nothing to report, nothing changed
    changed: bool  # the logits, by penalties or a bias
    greedy: bool  # the largest of the logits that a constraint allows, and nothing to report

    @property
    def plain(self) -> bool:
        """The largest logit, whatever it is."""
        return self.simple and self.greedy

    def allowed(self) -> np.ndarray:
        """The words of the constraint's mask, filled once for a token."""
        if not self.masked and self.constraint is not None:
            self.constraint.fill(self.mask)
            self.masked = True
        return self.mask

    def draw(self) -> Draw:
        """How the next token is drawn."""
        return Draw(self.params, self.stream, self.index)

    def take(self, id: int) -> None:
        """The text goes on with this token."""
        if self.constraint is not None:
            self.constraint.advance(id)
        self.took(id)

    def took(self, id: int) -> None:
        """The same, after the constraint took the token."""
        self.index += 1
        self.masked = False
        if self.counts is not None and self.seen is not None:
            self.counts[id] += 1
            self.seen[id] = True


def drawn_token(logits: np.ndarray, draw: Draw) -> int:
    """The token of a draw from logits, float32 [vocab]."""
    ids, weights = token_probabilities(logits, draw.params)
    at = _drawn(weights, uniform(draw.stream, draw.index))
    return at if ids is None else int(ids[at])


class HostSampler:
    """Chooses tokens for the slots of a runner.

    Args:
        slots: their number. vocab: size of the vocabulary.
        drawn: what draws a token where the temperature is not 0.
    """

    def __init__(self, slots: int, vocab: int, drawn: Callable[[np.ndarray, Draw], int] = drawn_token) -> None:
        self._drawn = drawn
        self._no_mask = np.zeros(0, np.uint32)
        self._states = [
            _State(SamplingParams(), 0, 0, None, None, None, None, self._no_mask, False, True, False, True)
        ] * slots
        self._vocab = vocab

    def bind(self, slot: int, request: Request, generated: Sequence[int] = ()) -> None:
        """Begin a slot's request, after the tokens that it has generated already."""
        params, prompt, constraint = request.params, request.prompt, request.constrained(generated)
        counts = seen = biased = None
        if params.penalizes:
            counts = np.bincount(np.asarray(generated, np.int64), minlength=self._vocab).astype(np.int32)
            seen = counts > 0
            seen[np.asarray(prompt, np.int64)] = True
        if params.logit_bias:
            biased = np.fromiter(params.logit_bias, np.int64), np.fromiter(params.logit_bias.values(), np.float32)
        unchanged = params.logprobs is None and not params.changes_logits
        simple, greedy = unchanged and constraint is None, unchanged and params.temperature == 0
        mask = self._no_mask if constraint is None else np.zeros(mask_words(self._vocab), np.uint32)
        self._states[slot] = _State(
            params, stream_of(params.seed), len(generated), counts, seen, biased, constraint, mask, False, simple,
            params.changes_logits, greedy,
        )  # fmt: skip

    def is_simple(self, slot: int) -> bool:
        """Whether a slot's tokens are its largest logits, or drawn from them, and nothing else is asked for."""
        return self._states[slot].simple

    def draw_of(self, slot: int) -> Draw | None:
        """How a slot's next token is drawn; None where it is the largest logit."""
        state = self._states[slot]
        return None if state.params.temperature == 0 else state.draw()

    def skip(self, slot: int, count: int) -> None:
        """A slot's next ``count`` tokens were chosen elsewhere."""
        self._states[slot].index += count

    def sample(self, logits: np.ndarray, slots: Sequence[int]) -> list[Token]:
        """The next token of each slot.

        Args:
            logits: float32 [len(slots), vocab], a row per slot; not written.
        """
        tokens = [Token(id) for id in logits.argmax(1).tolist()]
        for row, slot in enumerate(slots):
            state, largest = self._states[slot], tokens[row].id
            # numpy takes what is no number for the largest.
            if not isfinite(logits.item(row, largest)):
                tokens[row] = Token(-1)
            elif state.greedy and state.constraint is not None and state.constraint.take(largest):
                # The usual case with a constraint, in which the other tokens need not be looked at.
                state.took(largest)
            elif not state.plain:
                tokens[row] = self._choose(logits[row], state)
        return tokens

    def forced(self, slot: int, ends: Collection[int], most: int) -> list[int]:
        """A slot's next tokens as far as a constraint allows one alone, up to ``most`` and none of ``ends``; taken as
        if they had been sampled. None where log-probabilities are asked for, which need the tokens' logits."""
        state, found = self._states[slot], list[int]()
        if state.constraint is None or state.params.logprobs is not None:
            return found
        while len(found) < most and not state.constraint.is_open():
            words = state.allowed()
            at = int(words.argmax())
            word = int(words[at])
            if not word or word & (word - 1) or np.count_nonzero(words) > 1:
                break
            id = at * 32 + word.bit_length() - 1
            if id in ends:
                break
            state.take(id)
            found.append(id)
        return found

    def _choose(self, logits: np.ndarray, state: _State) -> Token:
        params, original = state.params, logits
        if state.changed:
            logits = _changed(logits, state)
        if state.constraint is None:
            id = int(logits.argmax()) if params.temperature == 0 else self._drawn(logits, state.draw())
        else:
            logits = _masked(logits, state.allowed())
            id = int(logits.argmax())
            if logits[id] == -np.inf:
                return Token(-1)
            if params.temperature != 0:
                id = self._drawn(logits, state.draw())
        state.take(id)
        return Token(id) if params.logprobs is None else _report(original, id, params.logprobs)


def token_logprobs(logits: np.ndarray, ids: Sequence[int], alternatives: int) -> tuple[Token, ...]:
    """Tokens with their log-probabilities, and those of the likeliest ``alternatives``, from logits [rows, vocab]."""
    return tuple(_report(row, id, alternatives) for row, id in zip(logits, ids, strict=True))


def token_probabilities(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray]:
    """What is sampled from, where the temperature is not 0: ids ascending, None for all, and their probabilities up to
    a factor."""
    vocab = logits.size
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    ids = None
    if top_k < vocab:
        # Ties with the last one stay: which of equals a partition keeps is nobody's choice.
        ids = np.flatnonzero(logits >= np.partition(logits, vocab - top_k)[vocab - top_k])
        logits = logits[ids]
    weights = logits - logits.max()
    weights *= np.float32(1 / params.temperature)
    np.exp(weights, out=weights)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p * weights.max())
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: np.ndarray, p: float) -> np.ndarray:
    """Indices, ascending, of the fewest largest weights that make up a share ``p`` of their sum; of equal ones the
    first. The largest weight is 1."""
    wanted = p * float(weights.sum())
    for least in _LIKELY:
        kept = np.flatnonzero(weights >= least)
        candidates = weights[kept]
        # Sorting values is many times cheaper than finding their order.
        largest = np.sort(candidates)[::-1]
        mass = largest.astype(np.float64).cumsum()
        if mass[-1] >= wanted:
            break
    # A token stays while the mass before it is below p, so that the first one always stays.
    last = min(int(np.searchsorted(mass, wanted)), largest.size - 1)
    inside = candidates >= largest[last]
    if surplus := int(np.count_nonzero(inside)) - last - 1:
        tied = np.flatnonzero(candidates == largest[last])
        inside[tied[tied.size - surplus :]] = False
    return kept[inside]


def _drawn(weights: np.ndarray, number: float) -> int:
    """Where the cumulative weights reach ``number``, in [0, 1), of their sum. Of many, blocks are added up first:
    adding one weight after another is slow, and needed in one block alone."""
    first = 0
    if weights.size > 32 * _BLOCK:
        whole = weights.size // _BLOCK * _BLOCK
        blocks = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK))
        mass = np.append(blocks, weights[whole:].sum()).astype(np.float64).cumsum()
        number *= mass[-1]
        block = min(int(np.searchsorted(mass, number, side="right")), (weights.size - 1) // _BLOCK)
        first = block * _BLOCK
        number -= mass[block - 1] if block else 0.0
        mass = weights[first : first + _BLOCK].astype(np.float64).cumsum()
    else:
        mass = weights.astype(np.float64).cumsum()
        number *= mass[-1]
    return first + min(int(np.searchsorted(mass, number, side="right")), mass.size - 1)


def _masked(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The logits of the tokens that a mask allows, minus infinity for others. A mask that allows few has few words that
    are not zero; of one that allows many, finding their ids would take several times as long as looking at all."""
    words = np.flatnonzero(mask)
    if words.size * 8 >= mask.size:
        allowed = np.unpackbits(mask.view(np.uint8), count=logits.size, bitorder="little").view(np.bool_)
        return np.where(allowed, logits, np.float32(-np.inf))
    bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
    ids = (words[bits >> 5] << 5) + (bits & 31)
    ids = ids[: np.searchsorted(ids, logits.size)]
    masked = np.full_like(logits, -np.inf)
    masked[ids] = logits[ids]
    return masked


def _changed(logits: np.ndarray, state: _State) -> np.ndarray:
    params, logits = state.params, logits.copy()
    if state.counts is not None:
        if params.repetition_penalty != 1:
            seen = logits[state.seen]
            factor = np.float32(params.repetition_penalty)
            logits[state.seen] = np.where(seen > 0, seen / factor, seen * factor)
        if params.presence_penalty or params.frequency_penalty:
            logits -= np.float32(params.frequency_penalty) * state.counts
            logits -= np.float32(params.presence_penalty) * (state.counts > 0)
    if state.biased is not None:
        ids, biases = state.biased
        logits[ids] += biases
    return logits


def _report(logits: np.ndarray, id: int, alternatives: int) -> Token:
    highest = logits.max()
    norm = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        count = min(alternatives, logits.size)
        likeliest = np.argpartition(logits, logits.size - count)[logits.size - count :]
        likeliest = likeliest[np.lexsort((likeliest, -logits[likeliest]))]
        top = tuple((int(i), float(logits[i]) - norm) for i in likeliest)
    return Token(id, float(logits[id]) - norm, top)
