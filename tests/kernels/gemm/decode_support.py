"""What tests of the CUDA decode kernels share."""

import torch
from trirun_kernels import QuantSpec, dequantize, pack
from trirun_kernels.gemm.reference import int8_round_trip

from tests.kernels.gemm.prefill_support import REFERENCE

# Relative error against float64. Rounding an exact product to the type alone gives about 2.1e-4 and 1.7e-3; the
# float32 bound is that of 16-bit limbs under 30x outliers.
TOLERANCE = {torch.float16: 3.6e-4, torch.bfloat16: 3e-3, torch.float32: 3e-4}


def weight(n, k, group_size=-1, zero=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = QuantSpec(group_size, zero)
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
    shape = (n, spec.groups(k))
    scales = (torch.rand(shape, generator=generator) + 0.5) * torch.randn(shape, generator=generator).sign() * 0.02
    zeros = (torch.rand(shape, generator=generator) * 3).half() if zero is None else None
    return pack(codes, scales.half(), spec, zeros).to("cuda")


def rows(m, k, dtype=torch.float16, seed=1):
    """Gaussian rows with planted 30x outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x[:, torch.randperm(k, generator=generator)[: max(1, k // 500)]] *= 30
    return x.to("cuda", dtype)


def exact(x, w, bias=None, act_bits=16):
    x, w = x.to(REFERENCE), w.to(REFERENCE)
    values = x.double() if act_bits == 16 else int8_round_trip(x.float()).double()
    y = (values @ dequantize(w, torch.float32).double().T).to("cuda")
    return y if bias is None else y + bias.double()


def error(y, reference):
    assert torch.isfinite(y).all()
    return ((y.double() - reference).norm() / reference.norm()).item()
