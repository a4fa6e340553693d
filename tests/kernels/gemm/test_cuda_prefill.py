"""CUDA prefill: every product against float64 and against torch's own error. test_select.py has the choice of tiles."""

import itertools

import pytest
import torch
from trirun_kernels.gemm.ops import int2_gemm
from trirun_kernels.gemm.reference import int8_round_trip
from trirun_kernels.plan.problem import DEQUANTIZE, PREFILL_SM80, PREFILL_W2A8, PREFILL_WGMMA, Plan
from trirun_kernels.weights.packing import dequantize, pack
from trirun_kernels.weights.spec import QuantSpec

from tests.kernels.gemm.prefill_support import check, gpu, hopper, rows, run, weight


def plans():
    return [
        *(Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=split) for split in (1, 2, 3, 8)),
        *(Plan(PREFILL_WGMMA, tile_m=64, tile_n=256, cta_split=split) for split in (1, 2, 4)),
        *(Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=256, ctas=ctas) for tokens in (64, 128) for ctas in (1, 5, 132)),
        *(Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=192, ctas=ctas) for tokens in (64, 128) for ctas in (0, 1, 5, 132)),
        *(Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=192, cta_split=split) for tokens in (64, 128) for split in (2, 5)),
        *(Plan(PREFILL_WGMMA, tile_m=64, tile_n=128, cta_split=split) for split in (1, 2, 4, 8)),
        *(Plan(PREFILL_WGMMA, tile_m=64, tile_n=128, ctas=ctas) for ctas in (1, 5, 132)),
        Plan(PREFILL_SM80, tile_m=128),
    ]


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("zero", [1.0, 2.0, 1.5, 1.3, None])
def test_every_grid(dtype, group, zero):
    w, x = weight(320, 1152, group, zero), rows(129, 1152, dtype)
    bias = torch.randn(320, device="cuda").to(dtype)
    plain = zero in (1.0, 1.5, 2.0)
    tiles = [(128, 256)] + [(64, 256)] * (plain and group != 32)
    if plain or (group > 0 and zero is not None):
        tiles += [(64, 192), (128, 192), (64, 128)]
    for (tokens, rows_of_w), (split, ctas) in itertools.product(tiles, ((1, 0), (3, 0), (0, 3))):
        plan = Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=rows_of_w, cta_split=split, ctas=ctas)
        check(x, w, run(x, w, plan, bias=bias, pitch=8), bias=bias)
    plan = Plan(PREFILL_SM80, tile_m=128)
    check(x, w, run(x, w, plan, bias=bias, pitch=8), bias=bias)


@hopper
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 4e-4), (torch.bfloat16, 4e-3)], ids=str)
@pytest.mark.parametrize("zero", [0.0, 1.0, 1.5, 2.0, -1.25])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_scales_of_groups_may_have_any_size(dtype, allowed, zero, group):
    # Rows with scales near the smallest or the largest there are, with both, and with none; each judged by itself.
    sizes = torch.tensor([[2**-20] * 8, [3e4] * 8, [2**-10, 1, 2**-16, 200] * 2, [0, 2**-18, 0, 2**-5] * 2, [0] * 8])
    sizes, generator = sizes.repeat(64, 128 // group), torch.Generator().manual_seed(3)
    scales = (sizes * (1 + torch.rand(320, 1024 // group, generator=generator))).half()
    codes = torch.randint(0, 4, (320, 1024), dtype=torch.uint8, generator=generator)
    w, x = pack(codes, scales, QuantSpec(group, zero)).to("cuda"), rows(70, 1024, dtype)
    expected = (x.double() @ dequantize(w, torch.float64).t()).view(70, 64, 5)
    for tokens, rows_of_w in ((64, 128), (64, 192), (128, 192)):
        y = run(x, w, Plan(PREFILL_WGMMA, tile_m=tokens, tile_n=rows_of_w)).view(70, 64, 5)
        for kind in range(5):
            error = (y[..., kind].double() - expected[..., kind]).norm()
            assert error <= allowed * expected[..., kind].norm(), (tokens, rows_of_w, kind)


@hopper
@pytest.mark.parametrize("plan", plans(), ids=lambda p: f"{p.kernel}-{p.tile_m}x{p.tile_n}-{p.cta_split}-{p.ctas}")
def test_every_row_count(plan):
    w = weight(200, 2048, -1, 1.0)
    for m in (*range(1, 258, 9), 64, 65, 128, 129, 255, 256, 257):
        x = rows(m, 2048, torch.float16)
        check(x, w, run(x, w, plan))


@hopper
@pytest.mark.parametrize("plan", plans(), ids=lambda p: f"{p.kernel}-{p.tile_m}x{p.tile_n}-{p.cta_split}-{p.ctas}")
@pytest.mark.parametrize(("n", "k"), [(1, 2048), (63, 2040), (1001, 2056), (257, 2176)])
def test_tails_of_n_and_k(plan, n, k):
    w, wide = weight(n, k, -1, 1.0), rows(70, k + 8, torch.float16)
    for pitch in (0, -n % 8 + 8):  # with rows of y at multiples of 16 bytes, too
        check(wide[:, :k], w, run(wide[:, :k], w, plan, pitch=pitch))


@hopper
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("zero", [1.0, 1.5, 1.3, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_int8_activations(split, tokens, zero, dtype):
    w, x = weight(576, 1536, -1, zero), rows(150, 1536, dtype)
    bias = torch.randn(576, device="cuda").to(dtype)
    half_tiles = (split + split // 2, 0), (0, split * 4 - 3)
    for plan in (
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=256, cta_split=split),
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=256, ctas=1 + 3 * split),
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=192, ctas=split // 2 * 3),
        Plan(PREFILL_W2A8, tile_m=tokens, tile_n=192, cta_split=split),
        *(Plan(PREFILL_W2A8, tile_m=64, tile_n=128, cta_split=s, ctas=c) for s, c in half_tiles if tokens == 64),
    ):
        check(x, w, run(x, w, plan, act_bits=8, bias=bias), act_bits=8, bias=bias)


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_int8_codes_are_those_of_a_division(dtype):
    # Products with the identity are the codes times a scale: ties, where that is a power of two, and any values.
    codes = torch.eye(256, dtype=torch.uint8) + 1
    w = pack(codes, torch.ones(256, 1), QuantSpec(-1, 1.0)).to("cuda")
    generator = torch.Generator().manual_seed(5)
    scales = 2.0 ** torch.arange(-16, 8).unsqueeze(1)
    x = torch.randint(-252, 253, (24, 256), generator=generator) / 2 * scales
    x[:, 7] = 127 * scales[:, 0]
    x = torch.cat((x, torch.randn(200, 256, generator=generator))).to(dtype)
    expected = int8_round_trip(x.float()).to(dtype).cuda()
    for plan in (Plan(PREFILL_W2A8, tile_m=64, tile_n=128), Plan(PREFILL_SM80, tile_m=128)):
        assert torch.equal(run(x.cuda(), w, plan, act_bits=8), expected)
    assert torch.equal(int2_gemm(x.cuda()[:16], w, act_bits=8), expected[:16])  # as decode's kernels quantize


@hopper
def test_int8_activations_with_groups_run_in_fp16():
    w, x = weight(576, 1536, 64, 1.0), rows(150, 1536, torch.float16)
    for kernel in (PREFILL_WGMMA, PREFILL_SM80):
        check(x, w, run(x, w, Plan(kernel, tile_m=128, tile_n=256), act_bits=8), act_bits=8)


@hopper
@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_identity_reads_every_code_back(code):
    codes = torch.full((256, 256), code, dtype=torch.uint8)
    codes[::3, 1::5] = 3 - code
    w = pack(codes, torch.ones(256, 1), QuantSpec(-1, 1.0)).to("cuda")
    x = torch.eye(256, dtype=torch.float16, device="cuda")
    for plan in (p for p in plans() if p.cta_split <= 2):
        assert torch.equal(run(x, w, plan), (codes.half() - 1).t().cuda())


@hopper
def test_last_round_of_tiles_is_shared():
    # 140 tiles: eight more than an H200 has multiprocessors, which a second launch shares among clusters.
    w, x = weight(8960, 1024, -1, 1.0), rows(512, 1024, torch.float16)
    check(x, w, run(x, w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=1)))


@hopper
def test_repeats_are_bitwise_equal():
    w, x = weight(1024, 4096, 128, 1.0), rows(300, 4096, torch.float16)
    for plan in (
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=4),
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, ctas=50),
    ):
        first = run(x, w, plan)
        assert all(torch.equal(run(x, w, plan), first) for _ in range(100))


@hopper
def test_streams_do_not_disturb_each_other():
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


@hopper
@pytest.mark.parametrize("row", [0, 77])
def test_a_row_with_nan_or_infinity_spoils_only_itself(row):
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
    from trirun_kernels.gemm.cuda import run_plan

    w = weight(200, 320, group, zero)
    y = torch.full((200, 328), float("nan"), dtype=dtype, device="cuda")
    run_plan(torch.empty(200, 320, dtype=dtype, device="cuda"), w, None, y[:, :320], 16, Plan(DEQUANTIZE))
    assert torch.equal(y[:, :320], dequantize(w, dtype)) and y[:, 320:].isnan().all()


@hopper
def test_a_plan_without_an_instance_is_refused():
    from trirun_kernels.native import NativeError

    plans = (
        Plan(PREFILL_WGMMA, tile_m=64),
        Plan(PREFILL_WGMMA, tile_m=96),
        Plan(PREFILL_W2A8, tile_m=128),
        Plan(PREFILL_WGMMA, tile_m=128, tile_n=256, cta_split=2, ctas=3),
    )
    low = Plan(PREFILL_WGMMA, tile_m=128, tile_n=192), Plan(PREFILL_WGMMA, tile_m=64, tile_n=128)
    x = rows(70, 512, torch.float16)
    for zero, refused in ((1.0, plans), (None, plans + low)):  # tiles of fewer n tiles have no real zero points
        w = weight(256, 512, 32, zero)
        for plan in refused:
            with pytest.raises(NativeError, match="no kernel"):
                run(x, w, plan)


@hopper
def test_rows_off_16_bytes_are_refused():
    from trirun_kernels.native import NativeError

    w, wide = weight(256, 512, -1, 1.0), rows(70, 520, torch.float16)
    with pytest.raises(NativeError, match="misaligned"):
        run(wide[:, 1:513], w, Plan(PREFILL_WGMMA, tile_m=128, tile_n=256))
