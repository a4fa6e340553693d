"""What tests of CUDA products share."""

import os

import pytest
import torch
from trirun_kernels.gemm.reference import int8_round_trip
from trirun_kernels.weights.packing import dequantize, pack
from trirun_kernels.weights.spec import QuantSpec

gpu = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.gpu(capability=(9, 0))
# Where products are made that those of the kernels are compared with: scripts/sanitize_kernels.py asks for the CPU.
REFERENCE = os.environ.get("TRIRUN_REFERENCE", "cuda")


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
    from trirun_kernels.gemm.cuda import run_plan

    # NaN where the kernel must write, and beside it where it must not.
    out = torch.full((x.shape[0], w.n + pitch), float("nan"), dtype=x.dtype, device="cuda")
    run_plan(x, w, bias, out[:, : w.n], act_bits, plan)
    assert out[:, w.n :].isnan().all()
    return out[:, : w.n]


def check(x, w, y, act_bits=16, bias=None):
    """Relative error against float64 at most 1.5 times that of torch in 16 bits on the dense weight."""
    x, w, y = x.to(REFERENCE), w.to(REFERENCE), y.to(REFERENCE)
    bias = None if bias is None else bias.to(REFERENCE)
    exact = x.double() if act_bits == 16 else int8_round_trip(x.float()).double()
    dense = dequantize(w, torch.float64)
    expected = exact @ dense.t() + (0 if bias is None else bias.double())
    kind = torch.float16 if x.dtype == torch.float32 else x.dtype
    # On the CPU in float32, as the GPU adds up, rounded once.
    of = torch.float32 if REFERENCE == "cpu" else kind
    operands = (v if v is None else v.to(kind).to(of) for v in (exact, dense, bias))
    theirs = torch.nn.functional.linear(*operands).to(kind)
    assert not y.isnan().any()
    error, allowed = ((v.double() - expected).norm() / expected.norm() for v in (y, theirs))
    assert error <= 1.5 * allowed, f"{error:.2e} against torch's {allowed:.2e}"
