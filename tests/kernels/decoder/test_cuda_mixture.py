"""Decoders with mixtures of experts on a GPU against their reference."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import cuda_experts, reference
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_experts import Mixed, Routes
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_kernels.decoder.shape import Routing
from trirun_kernels.gemm.cuda import activation_bytes
from trirun_kernels.weights.stacked_experts import StackedExperts

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, gpu, random_packed
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
    pieces = ((0, 90), (90, 133), (133, 140), *((i, i + 1) for i in range(140, 150)))
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


@gpu
@BOTH
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize(
    ("hidden", "routing"),
    [(512, Routing(8, 2)), (2048, Routing(128, 8)), (2880, Routing(32, 4)), (3072, Routing(60, 4, normalize=False)),
     (7168, Routing(100, 6, "sigmoid")), (8208, Routing(16, 2)), (512, Routing(256, 8))],
)  # fmt: skip
def test_a_row_is_made_on_the_way_to_its_experts(hidden, routing, act_bits, dtype):
    generator = torch.Generator("cuda").manual_seed(hidden)

    def draw(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    residual, added, norm = draw(1, hidden) * 3, draw(1, hidden).to(dtype), draw(hidden)
    router, bias = (draw(routing.experts, hidden) * hidden**-0.5).to(dtype), draw(routing.experts)
    counter, slots = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    results = []
    for together in (False, True):
        stream, x = residual.clone(), torch.empty_like(added)
        limbs = torch.zeros(activation_bytes(1, -(-hidden // 128) * 128, act_bits), dtype=torch.uint8, device="cuda")
        make = ops.rows_struct if together else ops.rows
        rows = make(
            ops.RESIDUAL, added, residual=stream, norm=norm, eps=1e-6, scale=0.7, y=x, limbs=limbs, act_bits=act_bits
        )  # fmt: skip
        routes = cuda_experts.route(routing, x, router, counter, 1, bias=bias, slots=slots, rows=rows)
        results.append((stream, x, limbs, routes))
    (stream, x, limbs, apart), (made_stream, made, made_limbs, routes) = results
    torch.testing.assert_close(made_stream, stream, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made, x, rtol=2 * ROUNDING[dtype], atol=1e-6)
    for name in ("ids", "places", "order", "ends", "tiles"):
        assert torch.equal(getattr(routes, name), getattr(apart, name)), name
    torch.testing.assert_close(routes.weights, apart.weights, rtol=0.02, atol=1e-4)
    # Sums of squares in another order move an integer by one at most.
    codes = [each[: -(-hidden // 128) * 128 * 2 * act_bits // 8].view(torch.int8).view(-1, 2 * act_bits // 8, 16)
             for each in (made_limbs, limbs)]  # fmt: skip
    values = [(c[:, 0].int() * 256 + c[:, 1].int() if act_bits == 16 else c[:, 0].int()) for c in codes]
    assert (values[0] - values[1]).abs().max() <= 1 and values[0].abs().max() > 100


@gpu
@BOTH
@pytest.mark.parametrize(
    ("spec", "act_bits"),
    [(QuantSpec(-1, 1.0), 16), (QuantSpec(128, 1.5), 16), (QuantSpec(32, None), 16), (QuantSpec(-1, 1.0), 8)],
)
@pytest.mark.parametrize("m", [1, 3, 20])
def test_experts_take_rows_that_are_quantized(m, spec, act_bits, dtype):
    routing, k = Routing(9, 3), 640 if spec.group_size == 128 else 608
    parts = [[random_packed(128, k, spec, seed=2 * e + i) for i in range(2)] for e in range(9)]
    gate_up = StackedExperts.of(parts, [[torch.randn(128) for _ in range(2)] for _ in range(9)]).to("cuda")
    x = torch.randn(m, k, device="cuda").to(dtype)
    router, counter = torch.randn(9, k, device="cuda").to(dtype), torch.zeros(1, dtype=torch.int32, device="cuda")
    limbs = torch.empty(activation_bytes(m, 640, act_bits), dtype=torch.uint8, device="cuda")
    ops.rows(ops.PLAIN, x, limbs=limbs, act_bits=act_bits)
    for tile_rows in (1, 2, 4):
        routes = cuda_experts.route(routing, x, router, counter, tile_rows)
        options = {"gathered": True, "activation": "silu", "act_bits": act_bits}
        expected = cuda_experts.experts(gate_up, x, routes, **options)
        assert torch.equal(cuda_experts.experts(gate_up, x, routes, limbs=limbs, **options), expected)
        assert torch.equal(cuda_experts.experts(gate_up, x, routes, older=False, **options), expected)


@gpu
@BOTH
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("m", [1, 5, 130])
def test_a_second_row_is_made_of_the_same_residual(m, act_bits, dtype):
    residual, norm = torch.randn(m, 608, device="cuda") * 3, torch.rand(608, device="cuda") + 0.5
    kept, y = residual.clone(), torch.empty(m, 608, device="cuda", dtype=dtype)
    ops.rows(ops.RESIDUAL, None, residual=kept, norm=norm, eps=1e-6, y=y)
    torch.testing.assert_close(y.float(), reference.rms_norm(residual, norm, 1e-6), rtol=2 * ROUNDING[dtype], atol=1e-6)
    if m <= 128:
        size = activation_bytes(m, 640, act_bits)
        both, alone = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        options = {"residual": kept, "norm": norm, "eps": 1e-6, "act_bits": act_bits}
        ops.rows(ops.RESIDUAL, None, y=y, limbs=both, **options)
        ops.rows(ops.RESIDUAL, None, limbs=alone, **options)
        assert torch.equal(alone, both) and both.any()
    assert torch.equal(kept, residual)


@gpu
@BOTH
@pytest.mark.parametrize("normed", [("norm",), ("shared_norm",), ("norm", "shared_norm")])
@pytest.mark.parametrize("beside", ["nothing", "a shared expert", "one with a gate"])
@pytest.mark.parametrize("m, n", [(1, 528), (5, 4104), (130, 528)])
def test_the_sum_of_experts_and_the_shared_one_have_norms_of_their_own(m, n, beside, normed, dtype):
    generator = torch.Generator("cuda").manual_seed(m)

    def draw(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    places = torch.randperm(m * 3, device="cuda", generator=generator).int().view(m, 3)
    # A row of padding goes to no expert.
    places[m // 2 :: 7] = -1
    weights, y, norms = draw(m, 3), draw(m * 3, n).to(dtype), {name: draw(n).sigmoid() + 0.5 for name in normed}
    shared = None if beside == "nothing" else draw(m, n).to(dtype)
    gate = draw(m).sigmoid() if beside == "one with a gate" else None
    routes = Routes(weights, places, places, places.flatten(), places, places, gate, 1)
    found = Mixed(y, routes, shared, **norms, eps=1e-5).sum()

    def through(x, name):
        return reference.rms_norm(x, norms[name], 1e-5) if name in norms else x

    there = weights * (places >= 0)
    expected = through((y[places.long()].float() * there.unsqueeze(-1)).sum(1), "norm")
    if shared is not None:
        expected += through(shared.float(), "shared_norm") * (1.0 if gate is None else gate.unsqueeze(1))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])
