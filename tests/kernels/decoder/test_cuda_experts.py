"""Mixtures of experts on CUDA: routing, and the products of all experts, against their references."""

from __future__ import annotations

import ctypes

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import cuda_experts, cuda_structs
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.reference import choose, gated, sorted_pairs
from trirun_kernels.decoder.shape import CLIPPED_SWIGLU, Mixture, Routing
from trirun_kernels.native import Int2Struct, NativeError
from trirun_kernels.weights.packing import dequantize
from trirun_kernels.weights.stacked_experts import StackedExperts

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, error, gpu, random_packed

ROUTINGS = {
    "qwen3_moe": Routing(128, 8),
    "qwen3_next": Routing(512, 10),
    "mixtral": Routing(8, 2),
    "olmoe": Routing(64, 8, normalize=False),
    "gpt_oss": Routing(32, 4),
    "glm4_moe": Routing(128, 8, "sigmoid", scale=2.5),
    "deepseek_v3": Routing(256, 8, "sigmoid", scale=2.5, groups=8, top_groups=4),
    "all": Routing(3, 3),
}


def test_structures_have_the_sizes_of_trirun_h():
    assert ctypes.sizeof(cuda_structs.RouteStruct) == 15 * 8 + 4 * 8 + 8 * 4 + 4 + 4 + 8
    assert ctypes.sizeof(cuda_structs.ExpertsStruct) == ctypes.sizeof(Int2Struct) + 6 * 8 + 5 * 8 + 8 * 4
    assert ctypes.sizeof(cuda_structs.CombineStruct) == 8 * 8 + 5 * 8 + 2 * 4 + 4 + 4


def routed(routing, m, dtype=torch.bfloat16, *, hidden=512, seed=0, tile_rows=4, shared=False, extras=True, x=None):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape, kind=torch.float32):
        return torch.randn(*shape, device="cuda", generator=generator).to(kind)

    x = draw(m, hidden, kind=dtype) if x is None else x
    router = (draw(routing.experts + shared, hidden) * 2 * hidden**-0.5).to(dtype)
    options = {}
    if extras:
        n, corrected = routing.experts, routing.score == "sigmoid" or not routing.normalize
        options |= {"bias": draw(n), "correction": draw(n).abs() if corrected else None, "expert_scale": draw(n)}
        options["slots"] = torch.arange(m, device="cuda", dtype=torch.int32)
        options["slots"][1::3] = -1
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    routes = cuda_experts.route(routing, x, router, counter, tile_rows, shared=shared, **options)
    assert counter.item() == 0
    return x, router, options, routes


@gpu
@BOTH
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("m", [1, 3, 8, 32, 64, 65, 700])
def test_rows_go_where_the_reference_sends_them(name, m, dtype):
    routing, shared = ROUTINGS[name], name == "qwen3_next"
    x, router, options, routes = routed(routing, m, dtype, shared=shared)
    logits = x.float() @ router.float().t()
    ids, weights = choose(routing, logits[:, : routing.experts] + options["bias"], options["correction"])
    weights *= options["expert_scale"][ids]
    kept = options["slots"] >= 0
    found = routes.ids.long()
    assert (found[~kept] == -1).all() and (routes.weights[~kept] == 0).all()
    # Sums in another order may exchange experts that are as good as equal.
    same = (found[kept] == ids[kept]).all(-1)
    assert same.float().mean() > 0.97
    torch.testing.assert_close(routes.weights[kept][same], weights[kept][same], rtol=2e-4, atol=1e-5)
    if shared:
        torch.testing.assert_close(routes.shared_weights, logits[:, -1].sigmoid(), rtol=1e-4, atol=1e-5)
    order, counts = sorted_pairs(found, routing.experts)
    assert torch.equal(routes.order[: len(order)].long(), order)
    assert torch.equal(routes.ends.long(), counts.cumsum(0))
    places = torch.full((m * routing.top_k,), -1, device="cuda")
    places[order] = torch.arange(len(order), device="cuda")
    assert torch.equal(routes.places.flatten().long(), places)
    expected, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        for at in range(0, count, routes.tile_rows):
            expected.append([expert, first + at, min(routes.tile_rows, count - at)])
        first += count
    tiles = routes.tiles[:, :3].tolist()
    assert tiles[: len(expected)] == expected
    assert all(tile[0] == -1 for tile in tiles[len(expected) :])


@gpu
@pytest.mark.parametrize("m", [5, 200])
def test_equal_experts_are_taken_by_their_index(m):
    routing = Routing(128, 8)
    x = torch.zeros(m, 512, device="cuda", dtype=torch.float16)
    *_, routes = routed(routing, m, torch.float16, extras=False, x=x)
    assert torch.equal(routes.ids.cpu(), torch.arange(8, dtype=torch.int32).expand(m, 8))
    torch.testing.assert_close(routes.weights.cpu(), torch.full((m, 8), 0.125))


@gpu
@pytest.mark.parametrize("m", [9, 200])
def test_a_nan_stays_in_its_row(m):
    routing = Routing(64, 4)
    x = torch.randn(m, 512, device="cuda", dtype=torch.float16)
    *_, good = routed(routing, m, torch.float16, extras=False, x=x.clone())
    x[3, 7] = float("nan")
    *_, routes = routed(routing, m, torch.float16, extras=False, x=x)
    assert routes.weights[3].isnan().all() and (routes.ids[3] >= 0).all() and (routes.ids[3] < 64).all()
    rest = torch.arange(m, device="cuda") != 3
    assert torch.equal(routes.ids[rest], good.ids[rest]) and torch.equal(routes.weights[rest], good.weights[rest])


def stacks(experts, hidden, inner, spec, bias):
    sizes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    packed = [[random_packed(n, k, spec, seed=3 * e + i) for i, (n, k) in enumerate(sizes)] for e in range(experts)]
    generator = torch.Generator().manual_seed(1)
    biases = [[torch.randn(w.n, generator=generator) * 0.3 for w in parts] if bias else [None] * 3 for parts in packed]
    gate_up = StackedExperts.of([p[:2] for p in packed], [b[:2] for b in biases])
    down = StackedExperts.of([p[2:] for p in packed], [b[2:] for b in biases])
    return packed, biases, gate_up, down


@gpu
@BOTH
@pytest.mark.parametrize(
    ("spec", "act_bits"),
    [(QuantSpec(-1, 1.0), 16), (QuantSpec(128, 1.5), 16), (QuantSpec(128, None), 16), (QuantSpec(64, None), 16),
     (QuantSpec(32, 1.5), 16), (QuantSpec(-1, None), 16), (QuantSpec(-1, 1.0), 8), (QuantSpec(128, 1.5), 8),
     (QuantSpec(64, None), 8)],
)  # fmt: skip
@pytest.mark.parametrize("k, n, activation", [(512, 384, "silu"), (640, 128, CLIPPED_SWIGLU), (512, 128, "gelu_tanh")])
def test_products_of_all_experts(k, n, activation, spec, act_bits, dtype):
    routing, limit = Routing(9, 3), 1.5
    packed, biases, gate_up, down = stacks(9, k, n, spec, activation == CLIPPED_SWIGLU)
    gate_up, down = gate_up.to("cuda"), down.to("cuda")
    dense = [[dequantize(w).cuda() for w in parts] for parts in packed]
    tiles = (1, 2, 4, 64, 128) if act_bits == 16 else (1, 4, 8)
    for m, tile_rows in [(m, rows) for m in (1, 7, 90) for rows in tiles]:
        x, *_, routes = routed(routing, m, dtype, hidden=k, seed=m, tile_rows=tile_rows, extras=m > 1)
        options = {"act_bits": act_bits}
        h = cuda_experts.experts(gate_up, x, routes, gathered=True, activation=activation, limit=limit, **options)
        y = cuda_experts.experts(down, h, routes, gathered=False, **options)
        again = cuda_experts.experts(down, h, routes, gathered=False, **options)
        places, pairs = routes.places.flatten(), 0
        assert torch.equal(y[places[places >= 0]], again[places[places >= 0]])
        for pair, place in enumerate(places.tolist()):
            if place < 0:
                continue
            expert = routes.ids.flatten()[pair].item()
            added = [0.0 if b is None else b.cuda() for b in biases[expert]]
            row = x[pair // 3].float()
            if act_bits == 8:
                scale = row.abs().max().clamp(min=1e-5) / 127
                row = (row / scale).round() * scale
            gate, up = (row @ w.t() + b for w, b in zip(dense[expert][:2], added[:2], strict=True))
            # The clipped activation adds one to up, which cancels: with real zeros, whose weights tiles of 64 rows
            # round to 16 bits, a row of 128 numbers is up to 2.6 roundings off in a model of these roundings alone.
            bound = ROUNDING[dtype] * (6 if activation == CLIPPED_SWIGLU else 3)
            expected = gated(gate, up, activation, limit)
            assert error(h[place], expected) < bound, (m, tile_rows, pair)
            row = h[place].float()
            if act_bits == 8:
                scale = row.abs().max().clamp(min=1e-5) / 127
                row = (row / scale).round() * scale
            assert error(y[place], row @ dense[expert][2].t() + added[2]) < bound, (m, tile_rows, pair)
            pairs += 1
            if pairs == 40:
                break


@gpu
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("activation", ["silu", "relu2", "gelu_tanh", CLIPPED_SWIGLU])
def test_no_activation_hides_a_nan(activation, act_bits):
    routing = Routing(4, 2)
    *_, gate_up, _ = stacks(4, 256, 128, QuantSpec(128, 1.5), False)
    x, *_, routes = routed(routing, 5, torch.float16, hidden=256, extras=False)
    x[3, 7] = float("nan")
    h = cuda_experts.experts(
        gate_up.to("cuda"), x, routes, gathered=True, activation=activation, limit=1.5, act_bits=act_bits
    )  # fmt: skip
    poisoned = torch.zeros(10, dtype=torch.bool, device="cuda")
    poisoned[routes.places[3].long()] = True
    assert h[poisoned].isnan().all() and h[~poisoned].isfinite().all()


@gpu
@BOTH
@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(128, 1.5), QuantSpec(32, None), QuantSpec(64, 1.0)])
def test_a_part_of_all_experts_made_dense(spec, dtype):
    packed, _, gate_up, _ = stacks(5, 256, 128, spec, False)
    for index, stacked, part in ((0, gate_up, 0), (1, gate_up, 1)):
        found = cuda_experts.dense_part(stacked.to("cuda"), part, dtype).float().cpu()
        expected = torch.stack([dequantize(each[index]) for each in packed]).to(dtype).float()
        torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=0)
    *_, odd, _ = stacks(2, 256, 72, QuantSpec(-1, 1.0), False)
    with pytest.raises(NativeError, match="dense experts"):
        cuda_experts.dense_part(odd.to("cuda"), 0, dtype)


@gpu
@pytest.mark.parametrize(("hidden", "size", "biased"), [(256, 128, False), (320, 192, False), (320, 192, True)])
def test_many_rows_of_experts_made_dense(hidden, size, biased):
    routing = Routing(4, 2)
    *_, gate_up, down = stacks(4, hidden, size, QuantSpec(64, 1.5), biased)
    x, router, _, routes = routed(routing, 700, torch.bfloat16, hidden=hidden, extras=False, tile_rows=64)
    mixture = Mixture(routing, size, "silu")
    runs = cuda_experts.CudaMixture(
        mixture, gate_up.to("cuda"), down.to("cuda"), router, None, None,
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    slots = torch.arange(700, dtype=torch.int32, device="cuda")
    assert runs._gains_from_dense(x) and not runs._gains_from_dense(x[:100])
    found = runs(x, slots).sum()
    if not biased:
        exact = runs.dense(torch.bfloat16)(x, slots).sum()
        assert error(found, exact) < 2 * ROUNDING[torch.bfloat16]
    h = cuda_experts.experts(runs.gate_up, x, routes, gathered=True, activation="silu")
    y = cuda_experts.Mixed(cuda_experts.experts(runs.down, h, routes, gathered=False), routes).sum()
    assert error(found, y) < 4 * ROUNDING[torch.bfloat16]


@gpu
@BOTH
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_is_the_weighted_sum_of_its_experts(shared, dtype):
    routing = Routing(16, 4)
    for m in (1, 5, 130):
        *_, routes = routed(routing, m, dtype, shared=shared, extras=m > 1)
        y = torch.randn(m * 4, 528, device="cuda").to(dtype)
        y[routes.order.numel() - int((routes.places < 0).sum()) :] = float("nan")
        beside = torch.randn(m, 528, device="cuda").to(dtype) if shared else None
        mixed = cuda_experts.Mixed(y, routes, beside)
        found = mixed.sum()
        expected = torch.zeros(m, 528, device="cuda")
        for rank in range(4):
            there = routes.places[:, rank] >= 0
            places = routes.places[there, rank].long()
            expected[there] += routes.weights[there, rank, None] * y[places].float()
        if shared:
            expected += routes.shared_weights[:, None] * beside.float()
        torch.testing.assert_close(found.float(), expected, rtol=ROUNDING[dtype] * 2, atol=ROUNDING[dtype])
        # In the pass that adds it to the residual stream it is not rounded.
        residual, norm = torch.randn(m, 528, device="cuda"), torch.rand(528, device="cuda") + 0.5
        summed, normed = residual.clone(), torch.empty(m, 528, device="cuda", dtype=dtype)
        ops.rows(
            ops.RESIDUAL, y, residual=summed, norm=norm, eps=1e-5, y=normed, mixed=mixed.struct(), scale=0.5
        )  # fmt: skip
        torch.testing.assert_close(summed, residual + 0.5 * expected, rtol=1e-5, atol=1e-5)
        exact = torch.nn.functional.rms_norm(summed, (528,), norm, 1e-5)
        torch.testing.assert_close(normed.float(), exact, rtol=ROUNDING[dtype] * 2, atol=ROUNDING[dtype])


@gpu
def test_a_graph_runs_whatever_is_routed():
    routing = Routing(16, 2)
    *_, gate_up, down = stacks(16, 256, 128, QuantSpec(128, 1.5), False)
    gate_up, down = gate_up.to("cuda"), down.to("cuda")
    router = torch.randn(16, 256, device="cuda", dtype=torch.float16)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    x = torch.empty(4, 256, device="cuda", dtype=torch.float16)

    def run():
        routes = cuda_experts.route(routing, x, router, counter, 4)
        h = cuda_experts.experts(gate_up, x, routes, gathered=True, activation="silu")
        return routes.places, cuda_experts.experts(down, h, routes, gathered=False)

    x.normal_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(5):
        x.normal_()
        graph.replay()
        places, y = (t.clone() for t in captured)
        expected_places, expected = run()
        assert torch.equal(places, expected_places) and torch.equal(y, expected)


def test_experts_of_another_shape_or_grid_are_refused():
    good = random_packed(64, 128, QuantSpec(128, 1.5))
    with pytest.raises(ValueError, match=r"expert 1 is \[64, 256\]"):
        StackedExperts.of([[good], [random_packed(64, 256, QuantSpec(128, 1.5))]])
    with pytest.raises(ValueError, match="expert 1"):
        StackedExperts.of([[good], [random_packed(64, 128, QuantSpec(64, 1.5))]])
    with pytest.raises(ValueError, match="routing"):
        Routing(8, 9)


@gpu
def test_sizes_that_no_kernel_has_are_refused():
    *_, down = stacks(4, 256, 128, QuantSpec(128, 1.5), False)
    x, *_, routes = routed(Routing(4, 2), 3, torch.float16, hidden=256, tile_rows=32)
    with pytest.raises(NativeError, match="experts"):
        cuda_experts.experts(down.to("cuda"), x, routes, gathered=True)
