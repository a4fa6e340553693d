"""Mixtures of experts on the CPU: the native decoder against its reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.arrays import Array
from trirun_kernels.decoder import reference
from trirun_kernels.decoder.cpu import CpuDecoder, Segment
from trirun_kernels.decoder.reference import choose
from trirun_kernels.decoder.shape import Routing

from tests.kernels.decoder.mixtures import MIXTURES, random_mixture
from tests.kernels.decoder.models import CONTEXT, VOCAB

EVERY = pytest.mark.parametrize("name", MIXTURES)


def decoder(weights, slots=3, threads=2, **options):
    return CpuDecoder(weights, slots=slots, context=CONTEXT, threads=threads, **({"kv_dtype": "float32"} | options))


def tokens_of(count, seed=1):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@EVERY
@pytest.mark.parametrize(
    ("spec", "act_bits"),
    [(QuantSpec(32, 1.5), 16), (QuantSpec(-1, 1.0), 16), (QuantSpec(32, None), 16), (QuantSpec(-1, 1.0), 8)],
)
def test_logits_are_those_of_the_reference(name, spec, act_bits):
    weights = random_mixture(name, spec=spec)
    tokens = tokens_of(40)
    expected = reference.forward(weights, tokens, act_bits=act_bits)
    found = decoder(weights, act_bits=act_bits).step([Segment(0, 0, 40)], tokens, torch.arange(40))
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # Where two experts are as good as equal, a row may choose the other one; and 8 bits may round the other way.
    assert (error < 1e-3).float().mean() > (0.9 if act_bits == 16 else 0.5), error


@EVERY
def test_a_row_has_the_same_logits_alone_and_in_any_batch(name):
    weights = random_mixture(name)
    tokens = tokens_of(30)
    whole = decoder(weights).step([Segment(0, 0, 30)], tokens, torch.arange(30))
    # In pieces, the last ones of a single row, beside another sequence, with another number of threads.
    for threads in (1, 3):
        parts = decoder(weights, threads=threads)
        other = tokens_of(7, seed=5)
        rows = [parts.step([Segment(0, 0, 11), Segment(2, 0, 7)], torch.cat((tokens[:11], other)), torch.arange(11))]
        rows += [parts.step([Segment(0, i, 1)], tokens[i : i + 1], torch.arange(1)) for i in range(11, 20)]
        rows += [parts.step([Segment(0, 20, 10)], tokens[20:], torch.arange(10))]
        assert torch.equal(torch.cat(rows), whole), threads


@EVERY
def test_sequences_generate_together_what_they_generate_alone(name):
    weights = random_mixture(name)
    prompts = [tokens_of(5 + i, seed=i) for i in range(3)]

    def generate(slots):
        runs = decoder(weights)
        last = []
        for slot in slots:
            count = len(prompts[slot])
            logits = runs.step([Segment(slot, 0, count)], prompts[slot], torch.tensor([count - 1]))
            last.append(int(logits.argmax()))
        positions = [len(prompts[slot]) for slot in slots]
        out, logits = np.zeros((12, len(slots)), np.int64), np.zeros((len(slots), VOCAB), np.float32)
        runs.generate(slots, positions, last, 12, [], Array.of(out), Array.of(logits))
        return out.T

    together = generate([0, 1, 2])
    for slot in range(3):
        assert np.array_equal(generate([slot])[0], together[slot])


def test_of_equal_experts_the_first_are_taken():
    weights = random_mixture("qwen3_moe")
    mixture = weights.layers[1].mixture
    tied = dataclasses.replace(mixture, router=torch.zeros_like(mixture.router))
    layers = [weights.layers[0], dataclasses.replace(weights.layers[1], mixture=tied)]
    weights = dataclasses.replace(weights, layers=layers)
    tokens = tokens_of(9)
    found = decoder(weights).step([Segment(0, 0, 9)], tokens, torch.arange(9))
    torch.testing.assert_close(found, reference.forward(weights, tokens), rtol=1e-3, atol=1e-3)
    ids, scales = choose(Routing(16, 4), torch.zeros(2, 16))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2 and torch.allclose(scales, torch.tensor(0.25))


def test_what_the_shape_does_not_say_is_refused():
    weights = random_mixture("qwen3_moe")
    mixture = weights.layers[1].mixture

    def refused(message, **changed):
        layer = dataclasses.replace(weights.layers[1], mixture=dataclasses.replace(mixture, **changed))
        with pytest.raises(ValueError, match=message):
            decoder(dataclasses.replace(weights, layers=[weights.layers[0], layer]))

    refused("up of 15 experts, the shape says 16", up=mixture.up[1:])
    refused("router must be", router=mixture.router[:5])
    refused("expert 3 down", down=[*mixture.down[:3], weights.layers[0].down, *mixture.down[4:]])
    other = random_mixture("qwen3_moe", spec=QuantSpec(-1, 1.5)).layers[1].mixture
    refused("expert 3 down has groups of -1, others 32", down=[*mixture.down[:3], *other.down[3:]])
    refused(r"expert_scale must be float32 \[16\]", expert_scale=torch.ones(15))
    layer = dataclasses.replace(weights.layers[0], shared_norm=torch.ones(96))
    with pytest.raises(ValueError, match="cannot run"):
        decoder(dataclasses.replace(weights, layers=[layer, weights.layers[1]]))
    with pytest.raises(ValueError, match="has no experts"):
        layer = dataclasses.replace(weights.layers[1], mixture=None)
        decoder(dataclasses.replace(weights, layers=[weights.layers[0], layer]))
