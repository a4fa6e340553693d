"""The CUDA decode kernels against float64: every grid, group, tail and plan; then what a serving engine relies on."""

import pytest
import torch
from trirun_kernels import QuantSpec, dequantize, pack
from trirun_kernels.gemm.ops import int2_gemm

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from trirun_kernels.gemm import cuda
from trirun_kernels.gemm.activations import int2_gemm_quantized, quantize_activations
from trirun_kernels.native import NativeError, library_path
from trirun_kernels.plan.problem import GROUPS, SPANS, STREAM, STREAM_SM80, Plan

from tests.kernels.gemm.decode_support import TOLERANCE, error, exact, rows, weight
from tests.kernels.gemm.prefill_support import HOPPER, run

if not library_path("cuda").exists():
    pytest.skip("libtrirun_cuda.so is not built", allow_module_level=True)

pytestmark = pytest.mark.gpu
GRIDS = [(-1, 1.0), (-1, 1.5), (-1, None), (128, 1.0), (128, None), (64, 2.0), (64, None), (32, 1.5), (32, None)]


def plans(n, m, k, act_bits, group_size):
    units, columns = -(-k // 128), m * (2 if act_bits == 16 else 1)
    grid = group_size, act_bits
    fuses, spans = grid in ((-1, 16), (128, 16)) and m <= 32, grid in ((-1, 16), (-1, 8), (128, 16))
    if columns <= 16:
        for kernel in (STREAM, STREAM_SM80) if HOPPER else (STREAM_SM80,):
            for warps, warp_split, cta_split, stages in ((8, 8, 1, 4), (8, 4, 2, 2), (16, 4, 4, 3), (4, 1, 1, 6)):
                if warp_split * cta_split <= units:
                    for fused in (0, 1) if m <= 8 else (0,):
                        yield Plan(kernel, 0, 0, warps, warp_split, cta_split, stages, fused=fused)
    if HOPPER and columns > 8:
        for ctas, stages, early, first, w in ((1, 5, 2, 1, 0), (3, 4, 0, 0, 32), (7, 3, 1, 1, 16), (132, 3, 2, 0, 0)):
            yield Plan(GROUPS, ctas=ctas, stages=stages + stages % 2, early=early, x_first=first)
            for tile in (0, 192) if spans else ():
                yield Plan(SPANS, w, tile, ctas=ctas, stages=stages, early=early, x_first=first)
            if fuses:  # a CTA quantizes no column twice: of no more k tiles than a tile has
                yield Plan(SPANS, ctas=max(ctas, -(-n // 256)), stages=stages, fused=1)
        for parts, fused in ((2, 0), (4, 0), (2, 1), (4, 1)):  # clusters of two
            if spans and units % parts == 0 and fused <= fuses:
                yield Plan(SPANS, cta_split=2, ctas=-(-n // 256) * parts, stages=4, fused=fused)


@pytest.mark.parametrize("group_size, zero", GRIDS)
@pytest.mark.parametrize("act_bits", [16, 8])
def test_every_plan_on_every_grid(group_size, zero, act_bits):
    for n, k in ((64, 128), (192, 1024), (700, 2560)):
        w = weight(n, k, group_size, zero)
        for m in (1, 3, 8, 9, 16, 33, 64):
            x = rows(m, k)
            bias = torch.randn(n, device="cuda").half()
            reference = exact(x, w, bias, act_bits)
            for plan in plans(n, m, k, act_bits, group_size):
                assert error(run(x, w, plan, act_bits, bias), reference) < TOLERANCE[x.dtype], (n, k, m, plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("act_bits", [16, 8])
def test_every_row_count(dtype, act_bits):
    w = weight(320, 1152, 128)
    for m in range(1, 66):
        if m == 65 and dtype != torch.float32:
            continue
        x = rows(m, 1152, dtype)
        assert error(int2_gemm(x, w, act_bits=act_bits), exact(x, w, None, act_bits)) < TOLERANCE[dtype], m


@pytest.mark.parametrize("n, k", [(1, 2), (65, 130), (100, 200), (63, 127), (1000, 999), (257, 4100)])
def test_any_shape(n, k):
    w = weight(n, k)
    for m in (1, 2, 7, 20):
        x = rows(m, k)
        # A handful of outputs does not average its rounding errors: each may be half a unit in the last place.
        assert error(int2_gemm(x, w), exact(x, w)) < (TOLERANCE[x.dtype] if n > 64 else 6e-4)


def test_strided_and_misaligned_rows():
    w = weight(128, 1024)
    wide = rows(6, 3 * 1024 + 3)
    for start in (0, 1, 2, 1024):
        x = wide[:, start : start + 1024]
        for view in (x, x[::2]):
            assert error(int2_gemm(view, w), exact(view, w)) < TOLERANCE[x.dtype]
    batched = rows(6, 1024).view(2, 3, 1024)
    assert torch.equal(int2_gemm(batched, w).view(6, 128), int2_gemm(batched.view(6, 1024), w))
    assert int2_gemm(rows(1, 1024)[:0], w).shape == (0, 128)


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_one_code_everywhere_and_identity_rows(code):
    codes = torch.full((64, 256), code, dtype=torch.uint8)
    w = pack(codes, torch.ones(64, 1), QuantSpec(-1, 1.0)).to("cuda")
    x = torch.eye(16, 256, device="cuda", dtype=torch.float16)
    for m in (1, 4, 8, 16):
        assert torch.equal(int2_gemm(x[:m], w), torch.full((m, 64), code - 1.0, device="cuda", dtype=torch.float16))


def test_identity_reads_back_the_weight():
    w = weight(192, 256, 32, None)
    dense = dequantize(w, torch.float32).T
    for first in range(0, 256, 8):
        x = torch.eye(256, device="cuda", dtype=torch.float32)[first : first + 8]
        assert torch.allclose(int2_gemm(x, w), dense[first : first + 8], rtol=1e-4, atol=1e-6)


def test_not_a_number_poisons_its_row_only():
    w = weight(128, 1024)
    x = rows(4, 1024)
    x[1, 77], x[2, 5] = float("nan"), float("inf")
    y = int2_gemm(x, w)
    assert torch.isfinite(y[[0, 3]]).all() and not torch.isfinite(y[[1, 2]]).any()


def test_zero_rows_give_the_bias():
    w = weight(128, 1024, 64, None)
    bias = torch.randn(128, device="cuda").half()
    y = int2_gemm(torch.zeros(3, 1024, device="cuda", dtype=torch.float16), w, bias)
    assert torch.equal(y, bias.expand(3, 128))


def test_runs_repeat_bitwise():
    w = weight(4096, 4096)
    for m in (1, 4, 8, 16, 64):
        x = rows(m, 4096)
        first = int2_gemm(x, w)
        for _ in range(100):
            assert torch.equal(int2_gemm(x, w), first)


def test_quantized_activations_are_the_same_product():
    w = weight(512, 2048, 128)
    bias = torch.randn(512, device="cuda").half()
    for m in (1, 2, 5, 16, 40):
        for act_bits in (8, 16):
            x = rows(m, 2048)
            limbs = quantize_activations(x, act_bits)
            assert limbs.numel() == cuda.activation_bytes(m, 2048, act_bits)
            y = int2_gemm_quantized(limbs, m, w, bias, act_bits=act_bits)
            assert error(y, exact(x, w, bias, act_bits)) < TOLERANCE[x.dtype]
    with pytest.raises(ValueError, match="bytes"):
        int2_gemm_quantized(limbs, 7, w)


def test_concurrent_streams():
    w = weight(2048, 4096)
    inputs = [rows(m, 4096, seed=m) for m in (1, 3, 8, 16)]
    expected = [int2_gemm(x, w) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results = [[] for _ in inputs]
    for _ in range(20):
        for stream, x, out in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                out.append(int2_gemm(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(y, e) for out, e in zip(results, expected, strict=True) for y in out)


def test_graph_capture_replays_on_new_inputs():
    w = weight(1024, 2048, 128)
    for m in (1, 6, 24):
        x, y = rows(m, 2048), torch.empty(m, 1024, device="cuda", dtype=torch.float16)
        int2_gemm(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Two products in a chain: the second may start before the first has ended.
            y.copy_(int2_gemm(x, w))
            y.add_(int2_gemm(x, w))
        for seed in range(3):
            x.copy_(rows(m, 2048, seed=seed))
            graph.replay()
            assert torch.equal(y, int2_gemm(x, w) * 2)


@pytest.mark.gpu(capability=(9, 0))
def test_a_graph_whose_counters_begin_as_anything():
    w = weight(4096, 4096)
    for m in (9, 16, 32):
        x = rows(m, 4096)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            junk = torch.full((8 << 20,), 0x5A, dtype=torch.uint8, device="cuda")
            del junk  # its memory is the workspace's
            y = int2_gemm(int2_gemm(int2_gemm(x, w), w), w)
        for seed in range(5):
            x.copy_(rows(m, 4096, seed=seed))
            graph.replay()
            assert torch.equal(y, int2_gemm(int2_gemm(int2_gemm(x, w), w), w)), m


def test_graphs_depend_on_no_memory_outside_of_them():
    from trirun_kernels.f16acc.ops import f16acc_gemm
    from trirun_kernels.gemm import workspace

    w, generator = weight(4096, 4096), torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(n, 8192, device="cuda", generator=generator).half() for n in (64, 128))  # k is shared
    graphs, inputs, outputs = [], [], []
    for m in (3, 8):
        x = rows(m, 4096)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing ran before: the graph has to bring memory and zeros of its own
            limbs = quantize_activations(x)
            y = int2_gemm(x, w), int2_gemm_quantized(limbs, m, w), f16acc_gemm(a, b), int2_gemm_quantized(limbs, m, w)
        graphs.append(graph), inputs.append(x), outputs.append(y)
    with torch.inference_mode():  # where another test may have made them
        for buffer in workspace._buffers.values():
            buffer.fill_(255)
    for seed in range(3):
        for x in inputs:
            x.copy_(rows(*x.shape, seed=seed))
        for graph, x, y in zip(graphs, inputs, outputs, strict=True):
            for part in y:
                part.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            for part in (y[0], y[1], y[3]):
                assert error(part, exact(x, w)) < TOLERANCE[x.dtype]
            torch.testing.assert_close(y[2].double(), a.double() @ b.double().T, rtol=4e-3, atol=0.5)
    workspace._buffers.clear()


def test_compile_and_opcheck():
    w = weight(256, 512)
    x = rows(2, 512)
    compiled = torch.compile(lambda v: int2_gemm(v, w) + 1, fullgraph=True)
    assert torch.equal(compiled(x), int2_gemm(x, w) + 1)
    args = (x, w.words, w.scales, None, None, w.n, w.k, -1, 1.0, 16)
    torch.library.opcheck(torch.ops.trirun.int2_gemm.default, args)
    torch.library.opcheck(torch.ops.trirun.quantize_activations.default, (x, 16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_gpu():
    w, x = weight(256, 1024), rows(3, 1024)
    expected = int2_gemm(x, w)
    other = int2_gemm(x.to("cuda:1"), w.to("cuda:1"))
    assert other.device.index == 1 and torch.equal(other.cpu(), expected.cpu())


def test_plans_without_an_instance_are_refused():
    w, x = weight(64, 8192), rows(1, 8192)
    y = torch.empty(1, 64, device="cuda", dtype=torch.float16)
    for plan in (
        Plan(99),
        Plan(STREAM, warps=8, warp_split=3, cta_split=1, stages=4),
        Plan(STREAM, warps=16, warp_split=16, cta_split=4, stages=4),
        *(Plan(GROUPS, ctas=ctas, stages=stages) for ctas, stages in ((1, 99), (0, 4), (1, 2), (1, 5))),
        *(Plan(SPANS, w, ctas=4, stages=s, early=2, x_first=x) for w, s, x in ((0, 2, 0), (0, 4, 3), (1, 4, 0))),
        *(Plan(SPANS, 0, tile, cta_split=split, ctas=3, stages=4) for tile, split in ((0, 2), (64, 0))),
    ):
        with pytest.raises(NativeError, match=r"x torch.float16 \[1, 8192\], n=64"):
            cuda.run_plan(x, w, None, y, 16, plan)
