"""Output heads of GPUs in 16 and in 8 bits against float64, and the latter against that of CPUs."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels.decoder.cpu import quantize_head
from trirun_kernels.decoder.cuda_head import HalfProjection, Int8Projection
from trirun_kernels.decoder.weights import Int8Head

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, assert_nan_stays_in_its_row, error, gpu


@gpu
@BOTH
@pytest.mark.parametrize("numbers", [torch.float16, torch.bfloat16])
# Of one piece of columns, of equal ones and of unequal ones, and of more columns than the kernels of few rows take.
@pytest.mark.parametrize(
    "vocab, hidden",
    [(32000, 2048), (1000, 1056), (1000, 1088), (128256, 2560), (20008, 5120), (1000, 8192), (512, 8224)],
)
def test_sixteen_bit_heads(dtype, numbers, vocab, hidden):
    generator = torch.Generator("cuda").manual_seed(vocab)
    head = torch.randn(vocab, hidden, generator=generator, device="cuda").to(numbers).to(dtype)
    projection = HalfProjection(head)
    taken = torch.cuda.get_device_capability() == (9, 0) and hidden <= 8192
    assert projection.few == (8 if taken else 0)
    narrow = taken and hidden % 64 == 0 and hidden <= 4096 and torch.bfloat16 in (dtype, numbers)
    assert (projection.compact is not None) == narrow
    for m in (1, 2, 3, 8, 9):
        x = torch.randn(m, hidden, generator=generator, device="cuda", dtype=dtype)
        exact = x.double() @ head.double().T
        found = projection(x)
        assert error(found, exact) < 2 * ROUNDING[dtype], m
        assert all(torch.equal(projection(x), found) for _ in range(20))
        if 1 < m <= projection.few:  # a row alone, too
            assert torch.equal(projection(x[m - 1 :]), found[m - 1 :])
            assert_nan_stays_in_its_row(projection, x, found)


@gpu
@pytest.mark.parametrize("numbers", [torch.float16, torch.bfloat16])
def test_a_sixteen_bit_head_waits_for_the_kernel_before(numbers):
    head = torch.randn(32000, 2048, device="cuda").to(numbers).half()
    projection, weight = HalfProjection(head), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    x = torch.randn(4, 2048, device="cuda", dtype=torch.float16) * 2048**-0.5
    expected = [projection(x @ weight) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [projection(x @ weight) for _ in range(3)]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


@gpu
@BOTH
@pytest.mark.parametrize("vocab, hidden", [(203, 96), (1000, 144), (4096, 1024), (20001, 512)])
def test_eight_bit_heads(dtype, vocab, hidden):
    generator = torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, hidden, generator=generator).to("cuda", dtype)
    projection = Int8Projection.of(head)
    step = head.float().abs().amax(1, keepdim=True) / 127
    assert ((projection.dequantize() - head.float()).abs() <= step * 0.5001).all()
    for m in (1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 130, 300):
        x = torch.randn(m, hidden, generator=generator).to("cuda", dtype)
        exact = x.double() @ projection.dequantize().double().T
        found = projection(x)
        assert error(found, exact) < 2 * ROUNDING[dtype], m
        if 1 < m <= 64:
            assert_nan_stays_in_its_row(projection, x, found)


def test_eight_bit_heads_are_those_of_the_cpu():
    head = torch.randn(203, 96, generator=torch.Generator().manual_seed(0))
    head[3] = 0
    out = Int8Head(torch.empty(203, Int8Head.stride(96), dtype=torch.uint8), torch.empty(203), 96)
    quantize_head(head, out, threads=1)
    found = Int8Projection.of(head)
    torch.testing.assert_close(found.scales, out.scales)
    # Of a value halfway between two levels either is right.
    assert (found.rows[:, :96].int() - out.rows[:, :96].int()).abs().max() <= 1
    assert torch.equal(found.dequantize()[3], torch.zeros(96))
