"""CUDA prefill: every product against float64 and against torch's own error. test_select.py has the choice of tiles."""

import itertools

import pytest
import torch
from trirun_kernels.packing import dequantize, pack
from trirun_kernels.reference import int8_round_trip
from trirun_kernels.select import DEQUANTIZE, PREFILL_SM80, PREFILL_W2A8, PREFILL_WGMMA, Plan
from trirun_kernels.spec import QuantSpec

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")


def weight(n, k, group, zero, seed=0):
    """Codes 0..3, scales of either sign, zeros where the grid stores them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    groups = 1 if group == -1 else k // group
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.01).half()
    scales *= 1 - 2 * (torch.rand(n, groups, generator=generator) < 0.2)
    zeros = (torch.rand(n, groups, generator=generator) * 3).half() if zero is None else None
    return pack(codes, scales, QuantSpec(group, zero), zeros).to("cuda")


def rows(m, k, dtype, seed=1):
    """Normal rows with a few columns 30 times larger, as language models have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x[:, torch.randperm(k, generator=generator)[: max(1, k // 200)]] *= 30
    return x.to(dtype).cuda()


def run(x, w, plan, act_bits=16, bias=None, pitch=0):
    from trirun_kernels.cuda import run_plan

    # NaN where the kernel must write, and beside it where it must not.
    out = torch.full((x.shape[0], w.n + pitch), float("nan"), dtype=x.dtype, device="cuda")
    run_plan(x, w, bias, out[:, : w.n], act_bits, plan)
    assert out[:, w.n :].isnan().all()
    return out[:, : w.n]


def check(x, w, y, act_bits=16, bias=None):
    """Relative error against float64 at most 1.5 times that of torch in 16 bits on the dense weight."""
    exact = x.double() if act_bits == 16 else int8_round_trip(x.float()).double()
    dense = dequantize(w, torch.float64)
    expected = exact @ dense.t() + (0 if bias is None else bias.double())
    kind = torch.float16 if x.dtype == torch.float32 else x.dtype
    theirs = torch.nn.functional.linear(exact.to(kind), dense.to(kind), None if bias is None else bias.to(kind))
    assert not y.isnan().any()
    error, allowed = ((v.double() - expected).norm() / expected.norm() for v in (y, theirs))
    assert error <= 1.5 * allowed, f"{error:.2e} against torch's {allowed:.2e}"


def plans():
    return [
        *(Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=split) for split in (1, 2, 3, 8)),
        *(Plan(PREFILL_WGMMA, tile_m=64, tile_n=256, cta_split=split) for split in (1, 2, 4)),
        *(Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=256, ctas=ctas) for tokens in (64, 128) for ctas in (1, 5, 132)),
        *(Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=192, ctas=ctas) for tokens in (64, 128) for ctas in (0, 1, 5, 132)),
        Plan(PREFILL_SM80, tile_m=128),
    ]


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("zero", [1.0, 2.0, 1.5, 1.3, None])
def test_every_grid(hopper, dtype, group, zero):
    w, x = weight(320, 1152, group, zero), rows(129, 1152, dtype)
    bias = torch.randn(320, device="cuda").to(dtype)
    kernels = (PREFILL_WGMMA, 1, 0), (PREFILL_WGMMA, 3, 0), (PREFILL_WGMMA, 0, 3), (PREFILL_SM80, 1, 0)
    small = group != 32 and zero in (1.0, 1.5, 2.0)
    for (kernel, split, ctas), tokens in itertools.product(kernels, (64, 128) if small else (128,)):
        if kernel == PREFILL_WGMMA or tokens == 128:
            for rows_of_w in (256, 192) if small and group == -1 and split < 2 else (256,):
                plan = Plan(kernel, tile_m=tokens, tile_n=rows_of_w, cta_split=split, ctas=ctas)
                check(x, w, run(x, w, plan, bias=bias, pitch=8), bias=bias)


@gpu
@pytest.mark.parametrize("plan", plans(), ids=lambda p: f"{p.kernel}-{p.tile_m}x{p.tile_n}-{p.cta_split}-{p.ctas}")
def test_every_row_count(hopper, plan):
    w = weight(200, 2048, -1, 1.0)
    for m in (*range(1, 258, 9), 64, 65, 128, 129, 255, 256, 257):
        x = rows(m, 2048, torch.float16)
        check(x, w, run(x, w, plan))


@gpu
@pytest.mark.parametrize("plan", plans(), ids=lambda p: f"{p.kernel}-{p.tile_m}x{p.tile_n}-{p.cta_split}-{p.ctas}")
@pytest.mark.parametrize(("n", "k"), [(1, 2048), (63, 2040), (1001, 2056), (257, 2176)])
def test_tails_of_n_and_k(hopper, plan, n, k):
    w, wide = weight(n, k, -1, 1.0), rows(70, k + 8, torch.float16)
    check(wide[:, :k], w, run(wide[:, :k], w, plan))


@gpu
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("zero", [1.0, 1.5, 1.3, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_int8_activations(hopper, split, tokens, zero, dtype):
    w, x = weight(576, 1536, -1, zero), rows(150, 1536, dtype)
    bias = torch.randn(576, device="cuda").to(dtype)
    for plan in (
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=256, cta_split=split),
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=256, ctas=1 + 3 * split),
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=192, ctas=split // 2 * 3),
    ):
        check(x, w, run(x, w, plan, act_bits=8, bias=bias), act_bits=8, bias=bias)


@gpu
def test_int8_activations_with_groups_run_in_fp16(hopper):
    w, x = weight(576, 1536, 64, 1.0), rows(150, 1536, torch.float16)
    for kernel in (PREFILL_WGMMA, PREFILL_SM80):
        check(x, w, run(x, w, Plan(kernel, tile_m=128, tile_n=256), act_bits=8), act_bits=8)


@gpu
@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_identity_reads_every_code_back(hopper, code):
    codes = torch.full((256, 256), code, dtype=torch.uint8)
    codes[::3, 1::5] = 3 - code
    w = pack(codes, torch.ones(256, 1), QuantSpec(-1, 1.0)).to("cuda")
    x = torch.eye(256, dtype=torch.float16, device="cuda")
    for plan in (p for p in plans() if p.cta_split <= 2):
        assert torch.equal(run(x, w, plan), (codes.half() - 1).t().cuda())


@gpu
def test_last_round_of_tiles_is_shared(hopper):
    # 140 tiles: eight more than an H200 has multiprocessors, which a second launch shares among clusters.
    w, x = weight(8960, 1024, -1, 1.0), rows(512, 1024, torch.float16)
    check(x, w, run(x, w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=1)))


@gpu
def test_repeats_are_bitwise_equal(hopper):
    w, x = weight(1024, 4096, 128, 1.0), rows(300, 4096, torch.float16)
    for plan in (
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=4),
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, ctas=50),
    ):
        first = run(x, w, plan)
        assert all(torch.equal(run(x, w, plan), first) for _ in range(100))


@gpu
def test_graphs_of_shared_tiles_replay(hopper):
    # A graph's workspace holds anything at its start: the counters of shared tiles are zeroed within the graph.
    from trirun_kernels.cuda import run_plan

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


@gpu
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize(("rows_of_w", "pair", "ctas"), [(256, 0, 37), (192, 0, 37), (256, 2, 64)])
def test_counters_of_shared_tiles_need_no_zeros(hopper, tokens, rows_of_w, pair, ctas):
    from trirun_kernels import cuda

    w, x = weight(1024, 2048, -1, 1.0), rows(100, 2048, torch.float16)
    plan = Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=rows_of_w, cta_split=pair, ctas=ctas)
    expected = run(x, w, plan)
    stream = torch.cuda.current_stream().cuda_stream
    counters = next(held for key, held in cuda._workspaces.items() if key[1] == stream)[: 64 << 10]
    counters.random_(0, 256)
    assert torch.equal(run(x, w, plan), expected)
    counters.zero_()  # other kernels do need them


@gpu
def test_streams_do_not_disturb_each_other(hopper):
    w = weight(512, 2048, -1, 1.0)
    xs = [rows(200, 2048, torch.float32, seed) for seed in range(4)]
    expected = [run(x, w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256)) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(x, w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256)))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@gpu
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("rows_of_w", [256, 192])
def test_shares_of_several_tiles(hopper, tokens, rows_of_w, act_bits):
    # CTAs that go on from what others end with, long before these get there or just before; and whole tiles between.
    w, x = weight(1792, 4096, -1, 1.5), rows(100, 4096, torch.float16)
    for ctas in (2, 3, 4, 5, 6, 9, 13):
        kernel = PREFILL_WGMMA if act_bits == 16 else PREFILL_W2A8
        plan = Plan(kernel, tile_m=tokens, tile_n=rows_of_w, ctas=ctas)
        y = run(x, w, plan, act_bits=act_bits)
        check(x, w, y, act_bits=act_bits)
        assert all(torch.equal(run(x, w, plan, act_bits=act_bits), y) for _ in range(5))


@gpu
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "group", "act_bits"), [
    (torch.float16, -1, 16), (torch.bfloat16, -1, 16), (torch.float16, 128, 16), (torch.float16, -1, 8)
])  # fmt: skip
def test_pairs_of_a_tile(hopper, tokens, parts, dtype, group, act_bits):
    w, bias = weight(700, 2048, group, 1.5), torch.randn(700, device="cuda").to(dtype)
    for m in (1, 60, 70, 129):
        x, tiles = rows(m, 2048, dtype), 3 * -(-m // tokens)
        kernel = PREFILL_WGMMA if act_bits == 16 else PREFILL_W2A8
        plan = Plan(kernel, tile_m=tokens, tile_n=256, cta_split=2, ctas=tiles * parts)
        y = run(x, w, plan, act_bits=act_bits, bias=bias, pitch=8 * (m % 2))
        check(x, w, y, act_bits=act_bits, bias=bias)
        assert torch.equal(run(x, w, plan, act_bits=act_bits, bias=bias), y)


@gpu
@pytest.mark.parametrize(("tokens", "rows_of_w", "pair", "ctas"), [
    (64, 256, 0, 37), (64, 256, 0, 132), (128, 256, 0, 37), (128, 256, 0, 132), (64, 192, 0, 37), (128, 192, 0, 132),
    (64, 256, 2, 128), (128, 256, 2, 64),
])  # fmt: skip
def test_shared_tiles_wait_for_nobody(hopper, tokens, rows_of_w, pair, ctas):
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


@gpu
@pytest.mark.parametrize("row", [0, 77])
def test_a_row_with_nan_or_infinity_spoils_only_itself(hopper, row):
    w, x = weight(128, 512, -1, 1.0), rows(130, 512, torch.float32)
    clean = run(x, w, Plan(PREFILL_W2A8, tile_m=128, tile_n=256), act_bits=8)
    x[row, 5] = float("nan")
    y = run(x, w, Plan(PREFILL_W2A8, tile_m=128, tile_n=256), act_bits=8)
    assert y[row].isnan().all()
    rest = torch.arange(130, device="cuda") != row
    assert torch.equal(y[rest], clean[rest])


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("group", "zero"), [(-1, 1.0), (64, None)])
def test_dense_weight(dtype, group, zero):
    from trirun_kernels.cuda import run_plan

    w = weight(200, 320, group, zero)
    y = torch.full((200, 328), float("nan"), dtype=dtype, device="cuda")
    run_plan(torch.empty(200, 320, dtype=dtype, device="cuda"), w, None, y[:, :320], 16, Plan(DEQUANTIZE))
    assert torch.equal(y[:, :320], dequantize(w, dtype)) and y[:, 320:].isnan().all()


@gpu
def test_a_plan_without_an_instance_is_refused(hopper):
    from trirun_kernels.native import NativeError

    w, x = weight(256, 512, 32, 1.0), rows(70, 512, torch.float16)
    for plan in (
        Plan(PREFILL_WGMMA, tile_m=64),
        Plan(PREFILL_WGMMA, tile_m=96),
        Plan(PREFILL_W2A8, tile_m=128),
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=192),  # groups
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=2, ctas=3),
    ):
        with pytest.raises(NativeError, match="no kernel"):
            run(x, w, plan)


@gpu
def test_rows_off_16_bytes_are_refused(hopper):
    from trirun_kernels.native import NativeError

    w, wide = weight(256, 512, -1, 1.0), rows(70, 520, torch.float16)
    with pytest.raises(NativeError, match="misaligned"):
        run(wide[:, 1:513], w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256))
