"""f16acc_gemm on a GPU: both kernels on tails, layouts and overflows; what the compiler makes of it for others."""

import re
import shutil
import subprocess

import pytest
import torch
from trirun_kernels import QuantSpec, dequantize, pack
from trirun_kernels.f16acc import reference as f16acc_reference
from trirun_kernels.f16acc.cuda import MMA, WGMMA, F16AccPlan, run_plan
from trirun_kernels.f16acc.linear import Fp16AccLinear
from trirun_kernels.f16acc.ops import CHUNK, f16acc_gemm
from trirun_kernels.gemm.ops import int2_gemm
from trirun_spills import parse_usage
from trirun_toolchain import NVCC_FLAGS, find_nvcc

gpu = pytest.mark.gpu


def operands(m, n, k, seed=0, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator) * 0.1
    bias = torch.randn(n, generator=generator)
    return a.half().to(device), b.half().to(device), bias.half().to(device)


def exact(a, b, bias=None):
    y = a.double() @ b.double().t()
    return y if bias is None else y + bias.double()


def rms(y, expected):
    return (y.double() - expected).square().mean().sqrt().item()


KERNELS = [(MMA, 128), (WGMMA, 128), (WGMMA, 256)]


def run(a, b, bias, plan):
    """One product under a plan; an output that is not written stays NaN."""
    n = b.shape[0]
    y = torch.full((a.shape[0], -(-n // 8) * 8), torch.nan, dtype=torch.half, device="cuda")
    run_plan(a, b, bias, y[:, :n], plan)
    # The copy engine fills the last 16 bytes of a row, which plans for wgmma keep free.
    assert plan.kernel == WGMMA or y[:, n:].isnan().all()
    return y[:, :n]


@pytest.fixture(params=KERNELS, ids=lambda kernel: f"{'mma' if kernel[0] == MMA else 'wgmma'}{kernel[1]}")
def kernel(request):
    if request.param[0] == WGMMA and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    return request.param


# Tails of every tile size, one row, fewer columns of k than a stage, more than one round of CTAs.
SIZES = [(1, 8, 8), (3, 16, 72), (128, 128, 192), (129, 264, 1000), (300, 523, 2056), (257, 9, 4096), (2100, 4104, 648)]


@gpu
@pytest.mark.parametrize("m,n,k", SIZES)
@pytest.mark.parametrize("chunk,parts", [(64, 1), (CHUNK, 1), (CHUNK, 3), (512, 2), (1 << 20, 1)])
def test_every_plan_on_every_tail(kernel, m, n, k, chunk, parts):
    if parts > -(-k // chunk):
        pytest.skip("a part without a chunk")
    a, b, bias = operands(m, n, k, device="cuda")
    plan = F16AccPlan(*kernel, chunk, parts)
    y = run(a, b, bias, plan)
    # The distribution of the reference's errors, with room for the warpgroup that rounds at other columns.
    expected, few = exact(a, b, bias), slice(max(0, m - 16), m)
    slow = f16acc_reference.f16acc_gemm(a[few].cpu(), b.cpu(), bias.cpu(), chunk).cuda()
    bound = 2 * rms(slow, expected[few]) + 1e-3
    assert y.isfinite().all() and rms(y, expected) < bound
    assert (y.double() - expected).abs().max() < 12 * bound
    assert torch.equal(y, run(a, b, bias, plan)), "bitwise the same twice"
    assert rms(run(a, b, None, plan), exact(a, b)) < bound


@gpu
@pytest.mark.parametrize("m,n,k", [(64, 64, 64), (300, 520, 2056), (130, 1000, 1021)])
@pytest.mark.parametrize("parts", [1, 2])
def test_transposed_operands(kernel, m, n, k, parts):
    """Stored along k, or along their rows as gradients find them: [k, n] and [k, m]."""
    if parts > -(-k // CHUNK):
        pytest.skip("a part without a chunk")
    a, b, bias = operands(m, n, k, device="cuda")
    plan = F16AccPlan(*kernel, CHUNK, parts)
    y, a_rows, b_rows = run(a, b, bias, plan), a.t().contiguous().t(), b.t().contiguous().t()
    for first, second in ((a, b_rows), (a_rows, b_rows), (a_rows, b)):
        assert torch.equal(run(first, second, bias, plan), y)


@gpu
def test_overflowing_sums_are_computed_again_on_the_gpu(kernel):
    m, n, k = 300, 264, 400
    a, b, _ = operands(m, n, k, device="cuda")
    # 200 · 1000 passes 65504 on the way to 0, in one row of a only.
    a[131, :200], a[131, 200:], b[17] = 200, -200, 5
    b[18] = 60000
    for parts in (1, 2):
        plan = F16AccPlan(*kernel, CHUNK, parts)
        y = run(a, b, None, plan)
        assert y[131, 17] == 0
        assert torch.equal(run(a.t().contiguous().t(), b.t().contiguous().t(), None, plan), y)
        expected = exact(a, b)
        others = torch.arange(m, device="cuda") != 131
        torch.testing.assert_close(y[others], expected[others].half(), rtol=4e-3, atol=2e-2)
        torch.testing.assert_close(y[131], expected[131].half(), rtol=4e-3, atol=1.0)
        assert y[:, 18].isinf().float().mean() > 0.9, "results beyond fp16 are infinite"
    a[5, 7] = torch.nan
    y = run(a, b, None, F16AccPlan(*kernel, CHUNK, 1))
    assert y[5].isnan().all() and not y[6].isnan().any()


@gpu
@pytest.mark.parametrize("shape", [(37,), (1, 37), (2, 5, 37), (0, 37), (4, 0), (130, 1021)])
@pytest.mark.parametrize("n", [0, 1, 9, 136])
def test_operator_on_any_shape(shape, n):
    a, b = torch.randn(shape, device="cuda").half(), torch.randn(n, shape[-1], device="cuda").half()
    bias = torch.randn(n + 1, device="cuda").half()[1:]
    y = f16acc_gemm(a, b, bias)
    assert y.shape == (*shape[:-1], n)
    torch.testing.assert_close(y.double(), exact(a, b, bias), rtol=4e-3, atol=0.1)
    strided = f16acc_gemm(a, torch.cat([b, b], 1)[:, : shape[-1]], bias)
    assert torch.equal(strided, y)


@gpu
def test_operator_contract_on_the_gpu():
    a, b, bias = (x.requires_grad_() for x in operands(48, 40, 72, device="cuda"))
    torch.library.opcheck(torch.ops.trirun.f16acc_gemm, (a, b, bias, CHUNK))
    upstream = torch.randn(48, 40, device="cuda").half()
    f16acc_gemm(a, b, bias).backward(upstream)
    torch.testing.assert_close(a.grad, upstream @ b, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(b.grad, upstream.t() @ a, rtol=4e-3, atol=4e-2)
    torch.testing.assert_close(bias.grad, upstream.sum(0), rtol=4e-3, atol=4e-2)
    layer = Fp16AccLinear(72, 40, device="cuda", dtype=torch.half)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(a), layer(a))


@gpu
def test_accuracy_of_the_default_on_the_gpu():
    a, b, _ = operands(512, 4096, 14336, device="cuda")
    error = f16acc_gemm(a, b)[0].double() - exact(a[:1], b)[0]
    assert error.square().mean().sqrt() <= 0.0075 and error.abs().max() <= 0.035


@pytest.fixture(scope="module", params=["86", "89", "120"])
def geforce(request, repo_root, tmp_path_factory):
    """mma.sync's source compiled for GPUs that gain from fp16 sums: the file, and what the compiler said."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    out = tmp_path_factory.mktemp("sass") / "f16acc.cubin"
    source = repo_root / "kernels" / "csrc" / "cuda" / "f16acc" / "f16acc.cu"
    target = ["-gencode", f"arch=compute_{request.param},code=sm_{request.param}", "-cubin"]
    includes = ["-I", str(repo_root / "kernels" / "csrc")]
    command = [nvcc, *NVCC_FLAGS, *target, *includes, str(source), "-o", str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_nothing_spills(geforce):
    usages = parse_usage(geforce[1])
    assert {usage.name.rpartition("::")[2] for usage in usages} == {"f16acc_mma_kernel", "f16acc_reduce_kernel"}
    assert all(usage.clean for usage in usages)


def test_tensor_cores_add_in_fp16(geforce):
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    sass = subprocess.run([cuobjdump, "-sass", str(geforce[0])], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"HMMA\.16816\.F16\b", sass)) >= 64


@gpu
@pytest.mark.parametrize("k", [256, 130])
def test_int2_gemm_with_fp16_sums_on_the_gpu(k):
    codes = torch.randint(0, 3, (70, k), dtype=torch.uint8)
    w = pack(codes, torch.rand(70, 1).half(), QuantSpec(-1, 1.0)).to("cuda")
    x, bias = torch.randn(5, k).half().cuda(), torch.ones(70).half().cuda()
    y = int2_gemm(x, w, bias, acc="fp16")
    assert torch.equal(y, f16acc_gemm(x, dequantize(w, torch.float16), bias))
