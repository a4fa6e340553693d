"""Decoders with mixtures of experts on a GPU against their reference."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import reference
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_weights import CudaModel

from tests.kernels.decoder.cuda_support import BOTH, gpu
from tests.kernels.decoder.mixtures import MIXTURES, random_mixture
from tests.kernels.decoder.models import VOCAB

EVERY = pytest.mark.parametrize("name", MIXTURES)


def decoder(model, slots=4):
    made = CudaDecoder(model, slots=slots, context=192)
    made.block_tables.copy_(torch.arange(slots * 3).view(slots, 3))
    return made


def inputs(tokens, slots, positions):
    return Inputs(*(torch.as_tensor(row).to("cuda", torch.int32) for row in (tokens, slots, positions)))


def piece(runs, tokens, slot, first, last):
    rows = inputs(tokens[first:last], [slot] * (last - first), list(range(first, last)))
    segments = [Segment(0, last - first, slot, first)] if last - first > 1 else []
    return runs.forward(rows, segments).float().cpu()


@gpu
@EVERY
@BOTH
@pytest.mark.parametrize(
    ("spec", "act_bits"), [(QuantSpec(32, 1.5), 16), (QuantSpec(-1, 1.0), 16), (QuantSpec(-1, 1.0), 8)]
)
def test_logits_are_those_of_the_reference(name, spec, act_bits, dtype):
    weights = random_mixture(name, spec=spec, dtype=dtype)
    tokens = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(1))
    expected = reference.forward(weights, tokens, act_bits=act_bits)
    runs = decoder(CudaModel.of(weights, "cuda", dtype, act_bits=act_bits))
    pieces = ((0, 90), (90, 140), *((i, i + 1) for i in range(140, 150)))
    found = torch.cat([piece(runs, tokens, 1, first, last) for first, last in pieces])
    assert torch.isfinite(found).all()
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # Where two experts are as good as equal, a row may choose the other one.
    assert errors.median() < (3e-3 if dtype == torch.float16 else 2e-2) * (1 if act_bits == 16 else 10), errors


@gpu
@EVERY
def test_a_batch_in_a_graph_repeats_and_padding_changes_nothing(name):
    weights = random_mixture(name)
    runs = decoder(CudaModel.of(weights, "cuda", torch.float16))
    prompts = [torch.randint(0, VOCAB, (20 + i,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for slot, prompt in enumerate(prompts):
        piece(runs, prompt, slot, 0, len(prompt))
    rows = inputs([5, 6, 7], [0, 1, 2], [20, 21, 22])
    expected = runs.forward(rows)
    assert torch.equal(runs.forward(rows), expected)
    padded = inputs([5, 6, 7, 9, 9], [0, 1, 2, -1, -1], [20, 21, 22, 0, 0])
    torch.testing.assert_close(runs.forward(padded)[:3], expected, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runs.forward(rows)
    graph.replay()
    assert torch.equal(captured, expected)
