"""Steps of models of real sizes, thousands of times: that no warp waits for what nobody will bring."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs

from trirun_cli.bench.shapes import decoder_shape_named
from trirun_cli.models.synthetic import random_model


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", ["falcon3-7b", "tinyllama-1.1b"])
@torch.inference_mode()
def test_every_step_ends_and_is_the_same(name, rows):
    # Of Falcon3's sizes gate | up goes two or three times round the ring, and warps do not wait for each other there.
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    device = torch.device("cuda")
    shape = decoder_shape_named(name)
    model = random_model(shape, QuantSpec(-1, 1.0), positions=256, device=device, dtype=torch.float16)
    decoder = CudaDecoder(model, slots=rows, context=256)
    assert decoder.step_refusal is None
    for layer in decoder.cache:
        layer.normal_()
    tables = decoder.block_tables
    tables.copy_(torch.arange(tables.numel(), device=device).view(tables.shape))
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    batch = Inputs(slots + 3, slots, torch.full_like(slots, 150))
    first = decoder.forward(batch)
    for _ in range(1000):
        found = decoder.forward(batch)
    assert (rows, False) in decoder._steps and torch.isfinite(found).all()
    assert torch.equal(found, first) and not decoder.gave_up
