"""Tokens drawn by the CPU library, against the sampler in numpy."""

import numpy as np
import pytest
from trirun_kernels import native
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import draw
from trirun_kernels.decoder.structs import DrawStruct

from trirun_cli.backends.cpu.sampler import token_probabilities
from trirun_cli.engine.sampling import SamplingParams, uniform

pytestmark = pytest.mark.skipif(not native.library_path("cpu").exists(), reason="the CPU library is not built")

PARAMS = [
    *({}, {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.9999}),
    *({"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.3}),
    {"top_k": 200, "top_p": 0.99, "min_p": 0.001},
]
# What two ways of adding the same probabilities up may differ by.
SLACK = 1e-5


def struct(stream, index, **params):
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | params
    return DrawStruct(values["temperature"], values["top_p"], values["min_p"], values["top_k"], stream, index)


def fits(logits, token, number, **params):
    """Whether a token is the one that a number in [0, 1) chooses, as numpy adds up."""
    ids, weights = token_probabilities(logits, SamplingParams(**params))
    ids = np.arange(logits.size) if ids is None else ids
    mass = weights.astype(np.float64).cumsum() / weights.sum(dtype=np.float64)
    if token not in ids:
        return False
    at = int(np.searchsorted(ids, token))
    return (mass[at - 1] if at else 0) - SLACK <= number <= mass[at] + SLACK


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("temperature", [0.05, 0.8, 3.0])
@pytest.mark.parametrize("vocab", [5, 203, 8192])
def test_draws_are_those_of_the_numpy_sampler(vocab, temperature, params):
    rng, params = np.random.default_rng(vocab), params | {"temperature": temperature}
    for stream in range(12):
        logits = (rng.normal(size=vocab) * 3).astype(np.float32)
        token = draw(Array.of(logits), struct(stream, stream % 5, **params))
        assert fits(logits, token, uniform(stream, stream % 5), **params)


def test_every_instruction_set_draws_the_same():
    library = native.load("cpu")
    logits = (np.random.default_rng(0).normal(size=(20, 5003)) * 4).astype(np.float32)
    logits[3, ::7], logits[4, 5:900] = np.nan, -np.inf
    found = {}
    try:
        for isa in (b"portable", b"avx2", b"avx512vnni"):
            if library.trirun_cpu_set_isa(isa) == 0:
                found[isa] = [
                    draw(Array.of(row), struct(9, index, **params))
                    for index, row in enumerate(logits)
                    for params in PARAMS
                ]
    finally:
        library.trirun_cpu_set_isa(None)
    assert all(tokens == found[b"portable"] for tokens in found.values())
    assert min(found[b"portable"]) >= 0 and len(set(found[b"portable"])) > 20


def test_the_share_of_every_token():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    drawn = [draw(Array.of(logits), struct(1, index)) for index in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn) / 4000, [0.1, 0.2, 0.3, 0.4], atol=0.03)


def test_of_equal_tokens_the_first_are_in_the_nucleus():
    logits = np.zeros(8, np.float32)
    assert {draw(Array.of(logits), struct(1, index, top_p=0.5)) for index in range(200)} == {0, 1, 2, 3}
    # Ties with the last of the k largest stay.
    logits[5] = 1
    assert {draw(Array.of(logits), struct(1, index, top_k=3)) for index in range(200)} == set(range(8))


def test_extremes():
    logits = np.full(300, -np.inf, np.float32)
    logits[[7, 250]] = 3e38, -3e38
    for params in ({}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 1e-300}, {"temperature": 1e300}):
        assert draw(Array.of(logits), struct(1, 1, **params)) in (7, 250)
    logits[9] = np.inf
    assert draw(Array.of(logits), struct(1, 1)) == 9
    assert draw(Array.of(np.full(300, np.nan, np.float32)), struct(1, 1)) == -1
    assert draw(Array.of(np.zeros(1, np.float32)), struct(1, 1, top_p=0.1)) == 0
