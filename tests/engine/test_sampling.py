"""Sampling: the distribution, its random numbers, penalties, and what is reported."""

import dataclasses

import numpy as np
import pytest

from trirun_cli.backends.cpu.sampler import HostSampler, token_logprobs, token_probabilities
from trirun_cli.engine.constraint import Constraint
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams, stream_of, uniform
from trirun_cli.errors import UsageError


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def distribution(logits, **params):
    """The probabilities [vocab] that tokens are drawn with."""
    ids, weights = token_probabilities(logits, SamplingParams(temperature=params.pop("temperature", 1.0), **params))
    ids = np.arange(logits.size) if ids is None else ids
    assert (np.diff(ids) > 0).all()
    dense = np.zeros(logits.size)
    dense[ids] = weights / weights.sum()
    return dense


def draw(logits, count, slot=0, generated=(), **params):
    sampler = HostSampler(slot + 1, logits.size)
    sampler.bind(slot, Request("", (0,), SamplingParams(**params)), generated)
    return [sampler.sample(logits[None], [slot])[0].id for _ in range(count)]


LOGITS = np.array([2.0, 1.0, 0.0, -1.0], np.float32)


def test_distribution():
    full = softmax(LOGITS)
    np.testing.assert_allclose(distribution(LOGITS), full, rtol=1e-6)
    np.testing.assert_allclose(distribution(LOGITS, temperature=0.5), softmax(LOGITS / 0.5), rtol=1e-6)
    two = np.array([full[0], full[1], 0, 0]) / full[:2].sum()
    np.testing.assert_allclose(distribution(LOGITS, top_k=2), two, rtol=1e-6)
    # 0.64 alone is below 0.7, so the second token belongs to the nucleus too.
    np.testing.assert_allclose(distribution(LOGITS, top_p=0.7), two, rtol=1e-6)
    assert distribution(LOGITS, top_p=1e-6).tolist() == [1, 0, 0, 0]
    # e^-1 = 0.37 of the likeliest stays, e^-2 = 0.14 does not.
    np.testing.assert_allclose(distribution(LOGITS, min_p=0.2), two, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"repetition_penalty": 1.2}])
def test_logits_that_are_not_finite_give_no_token(bad, params):
    logits = LOGITS.copy()
    logits[2] = bad
    assert draw(logits, 2, **params) == [-1, -1]
    logits[2] = -np.inf
    assert draw(logits, 1, **params)[0] in (0, 1, 3)
    assert draw(np.full_like(LOGITS, -np.inf), 1, **params) == [-1]


def test_a_nucleus_larger_than_the_first_search(p=0.9):
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    mass = softmax(logits.astype(np.float64))[order].cumsum()
    kept = set(order[: np.searchsorted(mass, p) + 1].tolist())
    assert len(kept) > 2048
    assert set(np.flatnonzero(distribution(logits, top_p=p)).tolist()) == kept


def test_of_equal_tokens_the_first_are_in_the_nucleus():
    logits = np.zeros(1000, np.float32)
    logits[[3, 700, 999]] = 5, 5, 1
    kept = np.flatnonzero(distribution(logits, top_p=0.35))
    assert kept[0] == 0 and 700 in kept and (np.diff(kept[kept < 400]) == 1).all()
    assert np.flatnonzero(distribution(np.zeros(8, np.float32), top_p=0.5)).tolist() == [0, 1, 2, 3]


def test_draws_follow_the_distribution_and_the_seed():
    logits = np.array([1.0, 0.0, -1.0], np.float32)
    drawn = draw(logits, 3000, temperature=1.0, seed=3)
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 3000, softmax(logits), atol=0.03)
    assert draw(logits, 50, temperature=1.0, seed=3) == drawn[:50] != draw(logits, 50, temperature=1.0, seed=4)
    # Of any slot, and taken up again after a pause.
    assert draw(logits, 40, slot=5, generated=drawn[:10], temperature=1.0, seed=3) == drawn[10:50]
    assert draw(logits, 50, temperature=1.0) != draw(logits, 50, temperature=1.0)
    assert draw(logits, 3) == [0, 0, 0]


def test_random_numbers_are_uniform_and_unrelated():
    numbers = np.array([[uniform(stream_of(seed), index) for index in range(200)] for seed in range(100)])
    assert numbers.min() >= 0 and numbers.max() < 1
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0] / numbers.size, 0.1, atol=0.01)
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03


def test_penalties_and_bias():
    logits = np.array([2.0, 1.9, 1.5, -1.0], np.float32)
    assert draw(logits, 4) == [0, 0, 0, 0]
    assert draw(logits, 4, presence_penalty=0.3) == [0, 1, 0, 0]
    assert draw(logits, 5, frequency_penalty=0.3) == [0, 1, 0, 1, 2]
    # The prompt is token 0: it counts for repetition, not for the other two.
    assert draw(logits, 4, repetition_penalty=1.1) == [1, 0, 0, 0]
    assert draw(np.array([-1.0, -1.05], np.float32), 1, repetition_penalty=1.2) == [1]
    assert draw(logits, 2, logit_bias={3: 3.5}) == [3, 3]
    assert draw(logits, 2, generated=[0, 0], presence_penalty=0.3) == draw(logits, 4, presence_penalty=0.3)[1:3]


class Allows(Constraint):
    """A constraint of one set of tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def fill(self, words):
        words[:] = 0
        for token in self.tokens:
            words[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token):
        assert token in self.tokens


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2}, {"logit_bias": {0: 100.0}}])
def test_no_end_is_chosen_before_the_fewest_tokens(params):
    # Tokens 0 and 40 end a text; 0 is the likeliest by far.
    logits = np.zeros(50, np.float32)
    logits[[0, 40, 7]] = 30, 20, 10
    request = Request("", (1,), SamplingParams(min_tokens=3, **params), frozenset({0, 40}))
    for done in range(5):
        sampler = HostSampler(1, logits.size)
        sampler.bind(0, request, [7] * done)
        ids = [sampler.sample(logits[None], [0])[0].id for _ in range(5 - done)]
        assert ids == [7, 7, 7, 0, 0][done:]
    sampler.bind(0, dataclasses.replace(request, params=SamplingParams(min_tokens=3, ignore_stop_ids=True)))
    assert sampler.sample(logits[None], [0])[0].id == 0


def test_a_complete_grammar_ends_a_text_before_its_fewest_tokens():
    logits = np.zeros(50, np.float32)
    params, sampler = SamplingParams(min_tokens=3), HostSampler(1, logits.size)
    for allowed, chosen in (((0, 9), 9), ((0,), 0)):
        sampler.bind(0, Request("", (1,), params, frozenset({0}), lambda allowed=allowed: Allows(*allowed)))
        assert sampler.sample(logits[None], [0])[0].id == chosen


@pytest.mark.parametrize("vocab", [50, 2048, 8203])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_of_many_and_of_few_tokens(vocab, temperature):
    rng, sampler = np.random.default_rng(vocab), HostSampler(1, vocab)
    for count in (vocab, vocab // 2, vocab // 200 + 1, 1, 0):
        logits = rng.normal(size=vocab).astype(np.float32)
        allowed = rng.choice(vocab, count, replace=False).tolist()
        params = SamplingParams(temperature=temperature, top_k=3, seed=count)
        sampler.bind(0, Request("", (1,), params, frozenset(), lambda allowed=allowed: Allows(*allowed)))
        best = sorted(allowed, key=lambda token: -logits[token])[: 3 if temperature else 1]
        found = {sampler.sample(logits[None], [0])[0].id for _ in range(5)}
        assert found <= set(best) if count else found == {-1}


def test_reported_probabilities_are_the_models_own():
    sampler = HostSampler(1, 4)
    params = SamplingParams(temperature=0.1, logprobs=2, logit_bias={2: 100.0})
    sampler.bind(0, Request("", (0,), params))
    (token,) = sampler.sample(LOGITS[None], [0])
    expected = np.log(softmax(LOGITS))
    assert token.id == 2 and token.logprob == pytest.approx(expected[2])
    assert [id for id, _ in token.top] == [0, 1]
    assert [value for _, value in token.top] == pytest.approx(expected[:2].tolist())
    (scored,) = token_logprobs(LOGITS[None], [3], 9)
    assert scored.logprob == pytest.approx(expected[3]) and len(scored.top) == 4


def test_rows_are_sampled_by_their_own_parameters():
    sampler = HostSampler(3, 4)
    for slot, params in enumerate(({}, {"temperature": 1.0, "seed": 1}, {"logprobs": 0})):
        sampler.bind(slot, Request("", (0,), SamplingParams(**params)))
    alone = draw(LOGITS, 6, temperature=1.0, seed=1)
    rows = [sampler.sample(np.stack([-LOGITS, LOGITS, LOGITS]), [0, 1, 2]) for _ in range(6)]
    assert [row[1].id for row in rows] == alone
    assert all(row[0].id == 3 and row[0].logprob is None and row[2].id == 0 and row[2].logprob < 0 for row in rows)


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}),
        *({"stop": ("",)}, {"min_p": 2}, {"seed": -1}, {"repetition_penalty": 0}, {"logprobs": -1}),
        *({"repetition_penalty": 1e5}, {"min_tokens": -1}, {"min_tokens": 129}),
        *({"presence_penalty": float("inf")}, {"logit_bias": {1: float("nan")}}, {"max_tokens": -1}),
    ],
)
def test_impossible_parameters(bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))} must be"):
        SamplingParams(**bad)
