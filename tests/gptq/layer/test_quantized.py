"""A weight that is packed a piece of its rows after another."""

from __future__ import annotations

import pytest
import torch
from trirun_gptq.layer import quantized
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels import QuantSpec, pack


@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(32, None)])
def test_pieces_make_the_same_weight(spec, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    n, k = 330, 160
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, spec.groups(k), generator=generator).half()
    zeros = torch.rand(n, spec.groups(k), generator=generator).half() if spec.zero is None else None
    monkeypatch.setattr(quantized, "PIECE_CODES", 100 * k)
    found, whole = Quantized(codes, scales, zeros, spec).pack(), pack(codes, scales, spec, zeros)
    assert torch.equal(found.words, whole.words) and torch.equal(found.scales, whole.scales)
    assert (found.zeros is None and whole.zeros is None) or torch.equal(found.zeros, whole.zeros)
    assert (found.n, found.k, found.spec) == (n, k, spec)
