"""f16acc_gemm: the reference's accuracy, the operator contract, Fp16AccLinear, the plan choice."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trirun_kernels import QuantSpec, dequantize, pack
from trirun_kernels.f16acc.cuda import MMA, WGMMA, gain, select_f16acc
from trirun_kernels.f16acc.linear import Fp16AccLinear
from trirun_kernels.f16acc.ops import CHUNK, STAGE, chunk_length, f16acc_gemm
from trirun_kernels.gemm.ops import int2_gemm
from trirun_kernels.plan.select import Device

H200 = Device(90, 132)


def operands(m, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator) * 0.1
    bias = torch.randn(n, generator=generator)
    return a.half(), b.half(), bias.half()


def exact(a, b, bias=None):
    y = a.double() @ b.double().t()
    return y if bias is None else y + bias.double()


def rms(y, expected):
    return (y.double() - expected).square().mean().sqrt().item()


def test_default_chunk_stays_near_fp32_sums():
    """One row of the original's picture: 14336 columns, normal times 0.1 normal."""
    a, b, _ = operands(1, 512, 14336)
    expected = exact(a, b)
    error = f16acc_gemm(a, b).double() - expected
    assert error.square().mean().sqrt() <= 0.0075 and error.abs().max() <= 0.035
    by_splits = [rms(f16acc_gemm(a, b, splits=s), expected) for s in (1, 8, 32)]
    assert by_splits[0] > 2 * by_splits[1] > 2 * by_splits[2], "more chunks, less error"
    assert 0.04 < by_splits[0] < 0.07, "all of k in fp16, as cuBLAS does it"


@pytest.mark.parametrize("shape", [(37,), (1, 37), (3, 37), (2, 5, 37), (0, 37), (4, 0)])
@pytest.mark.parametrize("n", [0, 1, 9])
def test_any_shape(shape, n):
    a, b, bias = torch.randn(shape).half(), torch.randn(n, shape[-1]).half(), torch.randn(n).half()
    y = f16acc_gemm(a, b, bias)
    assert y.shape == (*shape[:-1], n) and y.dtype == torch.float16
    torch.testing.assert_close(y.double(), exact(a, b, bias), rtol=2e-3, atol=2e-2)


def test_sums_beyond_fp16_are_computed_again():
    a, b = torch.full((1, 400), 200.0).half(), torch.full((2, 400), 5.0).half()
    a[0, 200:] = -200  # 200 · 1000 passes 65504 on the way to 0
    assert f16acc_gemm(a, b).tolist() == [[0.0, 0.0]]
    assert f16acc_gemm(a[:, :200], b[:, :200]).tolist() == [[torch.inf, torch.inf]]
    a[0, 7] = torch.nan
    assert f16acc_gemm(a, b).isnan().all()


def test_chunks_are_multiples_of_a_stage():
    assert CHUNK % STAGE == 0 and chunk_length(14336) == chunk_length(1) == CHUNK
    assert [chunk_length(14336, s) for s in (1, 8, 16, 32, 1000)] == [14336, 1792, 896, 448, 64]
    assert chunk_length(0, 3) == 64
    with pytest.raises(ValueError, match="splits=0"):
        chunk_length(64, 0)


def test_opcheck():
    a, b, bias = operands(3, 5, 40)
    for argument in (a, b, bias):
        argument.requires_grad_()
    torch.library.opcheck(torch.ops.trirun.f16acc_gemm, (a, b, bias, CHUNK))
    torch.library.opcheck(torch.ops.trirun.f16acc_gemm, (a, b, None, CHUNK))
    w = pack(torch.zeros(3, 130, dtype=torch.uint8), torch.ones(3, 1).half(), QuantSpec(-1, 1.0))
    torch.library.opcheck(torch.ops.trirun.int2_dense, (w.words, w.scales, None, 3, 130, -1, 1.0))


def test_gradients_are_those_of_the_product():
    a, b, bias = (x.requires_grad_() for x in operands(6, 5, 40))
    upstream = torch.randn(2, 3, 5).half()
    f16acc_gemm(a.view(2, 3, 40), b, bias).backward(upstream)
    rows = upstream.view(6, 5)
    torch.testing.assert_close(a.grad, rows @ b, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(b.grad, rows.t() @ a, rtol=2e-3, atol=1e-2)
    torch.testing.assert_close(bias.grad, rows.sum(0))


def test_compiles_into_one_graph():
    layer = Fp16AccLinear(40, 5)
    x = torch.randn(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), rtol=0, atol=0
        )


def test_flops_are_counted():
    a, b, bias = operands(6, 5, 40)
    with FlopCounterMode(display=False) as counter:
        f16acc_gemm(a.view(2, 3, 40), b, bias)
    assert counter.get_total_flops() == 2 * 6 * 5 * 40


def test_wrong_arguments_name_their_numbers():
    a, b, bias = operands(3, 5, 40)
    cases = [
        (dict(a=a.float()), "a is torch.float32"),
        (dict(a=a[:, :8]), r"a is \[3, 8\] and b \[5, 40\]"),
        (dict(b=b[0]), r"b \[40\]"),
        (dict(a=a.to("meta")), "a is on meta"),
        (dict(bias=bias[:4]), r"bias must be float16 \[5\]"),
        (dict(bias=bias.float()), "got torch.float32"),
        (dict(splits=-1), "splits=-1"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            f16acc_gemm(**{"a": a, "b": b, "bias": bias, **arguments})


def test_linear_is_a_drop_in():
    linear = torch.nn.Linear(40, 5)
    layer = Fp16AccLinear.from_linear(linear)
    assert layer.weight is linear.weight and layer.state_dict().keys() == linear.state_dict().keys()
    x = torch.randn(3, 40)
    y = layer(x)
    assert y.dtype == torch.float32 and layer(x.half()).dtype == torch.float16
    torch.testing.assert_close(y, linear(x), rtol=5e-3, atol=5e-3)
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert Fp16AccLinear(40, 5, bias=False, splits=2)(x).shape == (3, 5)


def test_plans_have_instances():
    shapes = itertools.product((1, 100, 512, 4096), (8, 10, 784, 4096), (1, 64, 784, 14336))
    for (m, n, k), arch in itertools.product(shapes, (80, 86, 89, 90, 100, 120)):
        plan = select_f16acc(m, n, k, CHUNK, Device(arch, 132))
        assert plan.kernel == (WGMMA if arch == 90 else MMA)
        assert plan.tile_n in ((128, 256) if plan.kernel == WGMMA else (128,))
        assert 1 <= plan.parts <= max(1, -(-k // CHUNK)), "no part without a chunk"
    with pytest.raises(ValueError, match=r"7\.5"):
        select_f16acc(1, 8, 64, CHUNK, Device(75, 40))


def test_large_products_take_large_tiles_and_small_ones_share_k():
    assert select_f16acc(8192, 8192, 8192, CHUNK, H200).tile_n == 256
    assert select_f16acc(8192, 8192, 8192, CHUNK, H200).parts == 1
    assert select_f16acc(128, 256, 14336, CHUNK, H200).parts > 4


@pytest.mark.parametrize(
    ("shape", "tile_n", "parts"),
    [
        # Measured side by side on an H200: microseconds of the choice, then of the runner-up.
        ((4096, 4096, 4096), 256, 1),  # 180, 208
        ((2048, 2048, 2048), 256, 1),  # 34.7, 39.5
        ((8192, 8192, 784), 256, 1),  # 169, 201
        ((512, 4096, 14336), 128, 1),  # 96.9, 104.6
    ],
)
def test_plan_is_the_measured_best(shape, tile_n, parts):
    plan = select_f16acc(*shape, CHUNK, H200)
    assert (plan.tile_n, plan.parts) == (tile_n, parts)


def test_int2_gemm_with_fp16_sums():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 3, (70, 256), dtype=torch.uint8, generator=generator)
    w = pack(codes, torch.rand(70, 2, generator=generator).half(), QuantSpec(128, 1.0))
    x, bias = torch.randn(5, 256, generator=generator).half(), torch.ones(70).half()
    y = int2_gemm(x, w, bias, acc="fp16")
    assert torch.equal(y, f16acc_gemm(x, dequantize(w, torch.float16), bias))
    torch.testing.assert_close(y, int2_gemm(x, w, bias), rtol=5e-3, atol=2e-2)
    for wrong in (dict(acc="fp8"), dict(acc="fp16", act_bits=8)):
        with pytest.raises(ValueError, match="acc="):
            int2_gemm(x, w, **wrong)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        int2_gemm(x.float(), w, acc="fp16")


@pytest.mark.parametrize(
    ("name", "arch", "times"),
    [("NVIDIA GeForce RTX 4090", 89, 2), ("NVIDIA GeForce RTX 3060", 86, 2), ("NVIDIA L40S", 89, 1), ("H200", 90, 1)],
)
def test_who_gains_from_fp16_sums(name, arch, times):
    assert gain(name, arch) == times
