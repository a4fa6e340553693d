"""What tests of the CUDA decoder share."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels import QuantSpec, pack
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.cuda_structs import SamplerStruct

gpu = pytest.mark.gpu
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def error(found, expected):
    assert torch.isfinite(found).all()
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_nan_stays_in_its_row(product, x, found):
    """``found`` is ``product(x)``, of several rows; the middle one of ``x`` is spoilt."""
    row = x.shape[0] // 2
    x[row, 5] = float("nan")
    spoilt = product(x)
    others = [other for other in range(x.shape[0]) if other != row]
    assert torch.equal(spoilt[others], found[others]) and spoilt[row].isnan().all()


def random_packed(n, k, spec=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = spec or QuantSpec(-1, 1.0)
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, spec.groups(k), generator=generator) + 0.5).mul(k**-0.5).half()
    zeros = torch.rand(n, spec.groups(k), generator=generator).half() if spec.zero is None else None
    return pack(codes, scales, spec, zeros)


def sampling_state(slots, vocab, rows, capacity=8):
    def zeros(*shape, dtype=torch.int32):
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    return ops.SamplingState(
        zeros(slots, ops.SAMPLER_BYTES, dtype=torch.uint8), zeros(slots), zeros(slots, vocab), zeros(slots, capacity),
        zeros(slots, capacity, dtype=torch.float32), zeros(rows, vocab, dtype=torch.float32),
    )  # fmt: skip


def bind(state, slot, **fields):
    struct = SamplerStruct(**({"top_p": 1.0, "repetition": 1.0} | fields))
    state.samplers[slot].copy_(torch.frombuffer(bytearray(struct), dtype=torch.uint8))
