"""bfloat16 in 12 bits: every bit of a weight comes back, or it is refused."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels.weights.twelve_bits import MOST_APART, TwelveBits


def drawn(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same_bits(found, expected):
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


# Of more rows than are packed at once, too.
@pytest.mark.parametrize("n, k", [(8, 64), (72, 1088), (4104, 128), (16, 4096)])
def test_every_bit_comes_back(n, k):
    weight = drawn(n, k) * k**-0.5
    packed = TwelveBits.of(weight)
    assert packed is not None and packed.records[:, 2].any() == (k > 64)
    assert_same_bits(packed.dequantize(), weight)
    assert packed.nbytes == n * k * 3 // 2 + n // 8 * 128


def test_rows_of_any_size_zeros_and_numbers_far_below():
    weight = drawn(16, 256)
    weight[1], weight[2] = 0, torch.tensor(0x0001, dtype=torch.int16).view(torch.bfloat16)
    weight[3] *= 1e-36
    weight[4] *= 1e19
    weight[5, ::2] = -0.0
    weight[6, 7], weight[6, 8], weight[15, 255] = 1e-30, -1e-39, 1e-20
    packed = TwelveBits.of(weight)
    assert packed is None  # of the third row no number has an exponent that is kept: they are all below normal ones
    weight[2] = 1
    packed = TwelveBits.of(weight)
    assert packed is not None
    assert_same_bits(packed.dequantize(), weight)


def test_halves_that_are_bfloat16_numbers_are_taken():
    weight = drawn(8, 128)
    for dtype in (torch.float16, torch.float32):
        packed = TwelveBits.of(weight.to(dtype))
        assert packed is not None
        assert_same_bits(packed.dequantize(), weight)
    finer = weight.half()
    finer[7, 3] = 1 + 2**-10
    assert TwelveBits.of(finer) is None


def test_a_record_has_room_for_so_many():
    weight = torch.ones(16, 64).bfloat16()
    weight[9, :MOST_APART] = 2.0**-15
    packed = TwelveBits.of(weight)
    assert packed is not None and packed.records[:, 2].tolist() == [0, MOST_APART]
    assert_same_bits(packed.dequantize(), weight)
    weight[10, 0] = 2.0**-15
    assert TwelveBits.of(weight) is None


@pytest.mark.parametrize("number", [2.0**80, float("inf"), float("nan")])
def test_numbers_beyond_all_weights_are_refused(number):
    weight = drawn(8, 64)
    weight[0, 0] = number
    assert TwelveBits.of(weight) is None
