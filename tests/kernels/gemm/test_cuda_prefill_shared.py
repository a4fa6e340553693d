"""CUDA prefill: tiles that several CTAs have parts of, whose sums come together. test_cuda_prefill.py has the rest."""

import itertools

import pytest
import torch
from trirun_kernels.plan.problem import PREFILL_W2A8, PREFILL_WGMMA, Plan

from tests.kernels.gemm.prefill_support import check, hopper, rows, run, weight


@hopper
def test_graphs_of_shared_tiles_replay():
    # A graph's workspace holds anything at its start: the counters of shared tiles are zeroed within the graph.
    from trirun_kernels.gemm.cuda import run_plan

    w, x = weight(1024, 2048, -1, 1.0), rows(100, 2048, torch.float16)
    plan = Plan(PREFILL_WGMMA, tile_m=64, tile_n=256, ctas=37)
    y = torch.empty(100, 1024, dtype=torch.float16, device="cuda")
    run_plan(x, w, None, y, 16, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_plan(x, w, None, y, 16, plan)
        run_plan(x, w, None, y, 16, plan)
    for seed in range(3):
        x.copy_(rows(100, 2048, torch.float16, seed))
        y.fill_(float("nan"))
        graph.replay()
        check(x, w, y)


@hopper
@pytest.mark.parametrize(("tokens", "rows_of_w", "pair", "ctas"), [
    (64, 256, 0, 37), (64, 192, 0, 37), (64, 256, 2, 64), (64, 256, 0, 3), (64, 192, 0, 5),
    (128, 256, 0, 37), (128, 192, 0, 37), (128, 256, 2, 64), (128, 256, 0, 3), (128, 192, 0, 5),
    (64, 128, 0, 37), (64, 128, 2, 64), (64, 128, 0, 5),
])  # fmt: skip
def test_counters_of_shared_tiles_need_no_zeros(tokens, rows_of_w, pair, ctas):
    from trirun_kernels.gemm import workspace

    w, x = weight(1024, 2048, -1, 1.0), rows(100, 2048, torch.float16)
    plan = Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=rows_of_w, cta_split=pair, ctas=ctas)
    expected = run(x, w, plan)
    stream = torch.cuda.current_stream().cuda_stream
    counters = next(held for key, held in workspace._buffers.items() if key[1] == stream)[: 64 << 10]
    counters.random_(0, 256)
    assert torch.equal(run(x, w, plan), expected)
    counters.zero_()  # other kernels do need them


@hopper
@pytest.mark.parametrize(("act_bits", "tokens", "rows_of_w", "group"), [
    *itertools.product((16, 8), (64, 128), (256, 192), (-1,)), (16, 64, 128, -1), (8, 64, 128, -1),
    (16, 64, 128, 128), (16, 64, 192, 128), (16, 128, 192, 128),
])  # fmt: skip
def test_shares_of_several_tiles(tokens, rows_of_w, act_bits, group):
    # CTAs that go on from what others end with, long before these get there or just before; and whole tiles between.
    w, x = weight(1792, 4096, group, 1.5), rows(100, 4096, torch.float16)
    for ctas in (2, 3, 4, 5, 6, 9, 13):
        kernel = PREFILL_WGMMA if act_bits == 16 else PREFILL_W2A8
        plan = Plan(kernel, tile_m=tokens, tile_n=rows_of_w, ctas=ctas)
        y = run(x, w, plan, act_bits=act_bits)
        check(x, w, y, act_bits=act_bits)
        assert all(torch.equal(run(x, w, plan, act_bits=act_bits), y) for _ in range(5))


@hopper
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("rows_of_w", "dtype", "group", "act_bits"), [
    (256, torch.float16, -1, 16), (256, torch.bfloat16, -1, 16), (256, torch.float16, 128, 16),
    (256, torch.float16, -1, 8), (192, torch.float16, -1, 16), (192, torch.bfloat16, -1, 16),
    (192, torch.float16, -1, 8), (128, torch.float16, -1, 16), (128, torch.bfloat16, -1, 16),
    (192, torch.float16, 128, 16), (128, torch.float16, 128, 16), (128, torch.bfloat16, 128, 16),
    (128, torch.float16, -1, 8),
])  # fmt: skip
def test_pairs_of_a_tile(tokens, parts, rows_of_w, dtype, group, act_bits):
    if rows_of_w == 128 and tokens == 128:
        pytest.skip("tiles of two n tiles take 64 rows of x")
    w, bias = weight(700, 2048, group, 1.5), torch.randn(700, device="cuda").to(dtype)
    for m in (1, 60, 70, 129):
        x, tiles = rows(m, 2048, dtype), -(-700 // rows_of_w) * -(-m // tokens)
        kernel = PREFILL_WGMMA if act_bits == 16 else PREFILL_W2A8
        plan = Plan(kernel, tile_m=tokens, tile_n=rows_of_w, cta_split=2, ctas=tiles * parts)
        y = run(x, w, plan, act_bits=act_bits, bias=bias, pitch=8 * (m % 2))
        check(x, w, y, act_bits=act_bits, bias=bias)
        assert torch.equal(run(x, w, plan, act_bits=act_bits, bias=bias), y)


@hopper
@pytest.mark.parametrize(("tokens", "rows_of_w", "pair", "ctas"), [
    (64, 256, 0, 37), (64, 256, 0, 132), (128, 256, 0, 37), (128, 256, 0, 132), (64, 192, 0, 37), (128, 192, 0, 132),
    (64, 256, 2, 128), (128, 256, 2, 64), (64, 256, 0, 5), (128, 192, 0, 5), (64, 128, 0, 37), (64, 128, 2, 64),
])  # fmt: skip
def test_shared_tiles_wait_for_nobody(tokens, rows_of_w, pair, ctas):
    # Beside other work the CTAs of a tile are not on the GPU together: whoever waits for the others' sums gives up.
    w, x = weight(1024, 4096, -1, 1.0), rows(100, 4096, torch.float16)
    plan = Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=rows_of_w, cta_split=pair, ctas=ctas)
    expected = run(x, w, plan)
    dense, other = torch.randn(8192, 8192, dtype=torch.float16, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(other):
        for _ in range(4):
            dense @ dense
    for _ in range(20):
        got.append(run(x, w, plan))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in got)
