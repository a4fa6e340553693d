"""GGUF's blocks, held against the values that the formats' own libraries give."""

import numpy as np
import pytest
import torch
from trirun_gptq.errors import QuantizationError

from tests.checkpoint.formats.gguf_writer import DATA, F32, one_tensor, two_bits
from trirun_cli.checkpoint.formats.gguf.blocks import read_codes, read_values
from trirun_cli.checkpoint.formats.gguf.file import GgufFile
from trirun_cli.checkpoint.formats.gguf.floats import read_floats
from trirun_cli.errors import InputError

BLOCKS = np.load(DATA / "gguf_blocks.npz")
# Name of the block to the type's id and the group size that its weights have.
QUANTIZED = {
    "q2_0": (42, 64), "pq2_0": (142, 128), "ptq1_0": (143, 128), "q1_0": (41, 128), "q1_0_raw": (41, 128),
    "tq1_0": (34, 128), "tq2_0": (35, 128), "tq2_0_raw": (35, 128), "iq1_bn": (134, -1), "iq2_bn": (135, -1),
    "i2_s": (36, -1),
}  # fmt: skip
FLOATS = {"q8_0": 8, "q4_0": 2, "q6_k": 14, "q4_k": 12}


def opened(path, kind, name):
    values = BLOCKS[f"{name}.values"]
    return GgufFile(one_tensor(path, kind, values.shape, BLOCKS[f"{name}.bytes"].tobytes())), values


@pytest.mark.parametrize(("name", "kind", "group_size"), [(name, *entry) for name, entry in QUANTIZED.items()])
def test_every_value_is_the_library_s_bit_for_bit(tmp_path, name, kind, group_size):
    file, values = opened(tmp_path / "m.gguf", kind, name)
    stored = np.concatenate([piece for _, piece in read_values(file, "x")])
    assert np.array_equal(stored.view(np.int32), values.view(np.int32))
    quantized, error = read_codes(file, "x")
    assert quantized.spec.group_size == group_size
    if name == "i2_s":
        # Its scale is no fp16 number.
        assert 0 < error < 2**-11
        assert np.allclose(quantized.dequantize().numpy(), values, rtol=error * 1.01, atol=0)
    else:
        assert error == 0
        assert np.array_equal(quantized.dequantize().numpy().view(np.int32), values.view(np.int32))
        if np.abs(values).max() < 65504:
            assert np.array_equal(read_floats(file, "x").float().numpy(), values)


def test_rows_are_decoded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("trirun_cli.checkpoint.formats.gguf.blocks._PIECE", 3 * 512)
    for name, (kind, _) in QUANTIZED.items():
        file, values = opened(tmp_path / "m.gguf", kind, name)
        assert [first for first, _ in read_values(file, "x")] == [0, 3, 6]
        assert np.array_equal(np.concatenate([piece for _, piece in read_values(file, "x")]), values)
        assert read_codes(file, "x")[0].codes.shape == (8, 512)


@pytest.mark.parametrize(("name", "kind"), FLOATS.items())
def test_float_types_are_the_nearest_fp16_of_the_library_s_values(tmp_path, name, kind):
    file, values = opened(tmp_path / "m.gguf", kind, name)
    if np.abs(values).max() < 65504:
        assert np.array_equal(read_floats(file, "x").numpy(), values.astype(np.float16))
    else:
        with pytest.raises(InputError, match="values that fp16 does not hold"):
            read_floats(file, "x")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([[1.5, -2.0]]).half(), torch.float16),
        (torch.tensor([[1.5, 3e38]]).bfloat16(), torch.bfloat16),
        (torch.tensor([[1.5, -2.0]]), torch.float16),
        (torch.tensor([[1.5, 0.1]]), torch.float32),
    ],
)
def test_plain_floats_lose_nothing(tmp_path, values, dtype):
    kind = {torch.float16: 1, torch.bfloat16: 30, torch.float32: F32}[values.dtype]
    raw = values.contiguous().view(torch.uint8).numpy().tobytes()
    found = read_floats(GgufFile(one_tensor(tmp_path / "m.gguf", kind, (1, 2), raw)), "x")
    assert found.dtype == dtype and torch.equal(found.float(), values.float())


def test_i2_s_of_another_build_has_other_weights(tmp_path):
    """Nothing in the file tells: both are valid, and the published files are of this one."""
    file, values = opened(tmp_path / "m.gguf", 36, "i2_s_arm")
    found = np.concatenate([piece for _, piece in read_values(file, "x")])
    assert 0.3 < (found == values).mean() < 0.6


def test_equal_scales_of_neighbours_are_one(tmp_path):
    rng = np.random.default_rng(0)
    trits = rng.choice([-1.0, 0, 1], (64, 256))
    trits[:, ::64] = 1
    for scales, group_size in (([1, 1, 2, 2], 128), ([1, 2, 2, 1], 64), ([3, 3, 3, 3], -1)):
        weight = trits * np.repeat(np.array(scales, np.float64), 64)
        file = GgufFile(one_tensor(tmp_path / "m.gguf", *two_bits(weight, 64)))
        quantized, _ = read_codes(file, "x")
        assert quantized.spec.group_size == group_size and np.array_equal(quantized.dequantize().numpy(), weight)


def test_code_3_of_ternary_types_and_scales_outside_of_fp16(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(QuantizationError, match="code 3, which I2_S has not"):
        read_codes(GgufFile(one_tensor(path, 36, (1, 128), b"\xff" * 32 + bytes(32))), "x")
    with pytest.raises(QuantizationError, match="code 3, which IQ2_BN has not"):
        read_codes(GgufFile(one_tensor(path, 135, (1, 64), bytes(4) + b"\xff" * 16)), "x")
    for scale in (1e6, 1e-9, np.nan):
        raw = bytes(32) + np.float32(scale).tobytes() + bytes(28)
        with pytest.raises(QuantizationError, match=r"row 0, group 0 has the scale .* outside of fp16"):
            read_codes(GgufFile(one_tensor(path, 36, (1, 128), raw)), "x")
    infinite = np.float16(np.inf).tobytes() + bytes(32)
    with pytest.raises(QuantizationError, match="has the scale inf, outside"), np.errstate(invalid="ignore"):
        read_codes(GgufFile(one_tensor(path, 142, (1, 128), infinite)), "x")
