"""Packed bitnet weights: the row order, both scale conventions, and refusals."""

import pytest
import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.lossless.bitnet import unpack_bitnet
from trirun_kernels import dequantize


def packed_by_definition(trits):
    """Packs one value at a time, straight from the format's definition."""
    n, k = trits.shape
    quarter = n // 4
    packed = torch.zeros(quarter, k, dtype=torch.uint8)
    for row in range(n):
        for column in range(k):
            packed[row % quarter, column] |= (int(trits[row, column]) + 1) << (2 * (row // quarter))
    return packed


@pytest.mark.parametrize(("divide", "stored"), [(True, 8.0), (False, 0.125)])
def test_both_conventions_give_the_same_weight(divide, stored):
    trits = torch.randint(-1, 2, (12, 40), generator=torch.Generator().manual_seed(0))
    quantized, error = unpack_bitnet(packed_by_definition(trits), torch.tensor([stored]), divide=divide)
    assert error == 0
    assert torch.equal(quantized.dequantize(), trits * 0.125)
    assert torch.equal(dequantize(quantized.pack()), trits * 0.125)


def test_transformers_unpacks_the_same_rows():
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    trits = torch.randint(-1, 2, (16, 24), generator=torch.Generator().manual_seed(1)).float()
    # Their functions are decorated with torch.compile, which is no part of what is compared here.
    with torch.compiler.set_stance("force_eager"):
        packed = pack_weights(trits)
        unpacked = unpack_weights(packed, torch.float32)
    quantized, _ = unpack_bitnet(packed, torch.tensor(1.0), divide=False)
    assert torch.equal(quantized.dequantize(), unpacked)


def test_an_inexact_scale_is_reported():
    _, error = unpack_bitnet(torch.zeros(2, 8, dtype=torch.uint8), torch.tensor(3.3), divide=True)
    assert 0 < error <= 2**-11


def test_defects_are_named():
    with pytest.raises(QuantizationError, match="o_proj: row 3, column 1 has code 3"):
        unpack_bitnet(torch.tensor([[0, 0b11000000]], dtype=torch.uint8), torch.ones(1), divide=False, name="o_proj")
    with pytest.raises(QuantizationError, match="outside fp16's range"):
        unpack_bitnet(torch.zeros(1, 4, dtype=torch.uint8), torch.tensor(1e-9), divide=True)
    with pytest.raises(QuantizationError, match="outside fp16's range"):
        unpack_bitnet(torch.zeros(1, 4, dtype=torch.uint8), torch.tensor(0.0), divide=True)
    with pytest.raises(QuantizationError, match="one weight_scale per tensor"):
        unpack_bitnet(torch.zeros(1, 4, dtype=torch.uint8), torch.ones(4), divide=True)
    with pytest.raises(QuantizationError, match="packed weights are uint8"):
        unpack_bitnet(torch.zeros(1, 4), torch.ones(1), divide=True)
