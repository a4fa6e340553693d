"""Writing foreign formats: what was read comes out byte for byte, and other libraries read what was written."""

import numpy as np
import pytest
import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels import QuantSpec

from trirun_cli.checkpoint.formats import bitnet, compressed_tensors, mlx
from trirun_cli.checkpoint.formats.gguf.writer import Q2_0, TQ1_0, TQ2_0, encode
from trirun_cli.checkpoint.formats.words import pack_words, unpack_words


def test_words_come_back(ternary):
    codes = torch.randint(0, 4, (5, 50), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes), 50), codes) and pack_words(codes).shape == (5, 4)


@pytest.mark.parametrize("name", ["mlx_2bit_bonsai_g128", "mlx_2bit_affine_g128"])
def test_mlx_comes_back_byte_for_byte(foreign_file, name):
    tensors, _ = foreign_file(name)
    weight, _ = mlx.read(tensors["weight"], tensors["scales"], tensors["biases"], 128)
    written, facts = mlx.write(weight)
    if "bonsai" in name:
        assert facts == {"group_size": 128, "bits": 2}
    again = mlx.dequantize(*(written[f".{part}"] for part in ("weight", "scales", "biases")), 128)
    assert torch.equal(again, mlx.dequantize(tensors["weight"], tensors["scales"], tensors["biases"], 128))
    assert all(torch.equal(written[f".{part}"].view(torch.uint8), tensors[part].view(torch.uint8)) for part in tensors)


@pytest.mark.parametrize("name", ["ct_int2_sym_g128", "ct_int2_full_g128", "ct_int2_asym_g128"])
def test_compressed_tensors_comes_back(foreign_file, name):
    tensors, _ = foreign_file(name)
    words, scales, shape = (tensors[f"weight_{part}"] for part in ("packed", "scale", "shape"))
    weight, _ = compressed_tensors.read(words, scales, shape, tensors.get("weight_zero_point"))
    written, facts = compressed_tensors.write(weight)
    assert torch.equal(written[".weight_packed"], words) and torch.equal(written[".weight_shape"], shape)
    assert torch.equal(written[".weight_scale"].float(), scales.float())  # fp16 here, bfloat16 there
    assert facts["symmetric"] is ("asym" not in name) and facts["strategy"] == "group"
    if "asym" in name:
        assert torch.equal(written[".weight_zero_point"], tensors["weight_zero_point"])


def test_bitnet_comes_back_byte_for_byte(foreign_file, model_dir):
    tensors, _ = foreign_file("bitnet_autobitlinear")
    config = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
    weight, error = bitnet.BitNetWeights.of(model_dir(tensors, **config)).read("a")
    written = bitnet.write(weight)
    assert torch.equal(written[".weight"], tensors["weight"])
    assert error > 0 or torch.equal(written[".weight_scale"].float(), tensors["weight_scale"].float())


def test_a_grid_from_minus_two_has_its_scale_turned(ternary):
    weight = ternary(zero=2.0, top=3)
    n, k = weight.n, weight.k
    assert torch.equal(q2_0_values(encode(weight, Q2_0), n, k), weight.dequantize())
    one_up = ternary(zero=1.0, top=3)
    written, _ = compressed_tensors.write(one_up)
    parts = (written[f".weight_{part}"] for part in ("packed", "scale", "shape"))
    assert torch.equal(compressed_tensors.read(*parts, None)[0].dequantize(), one_up.dequantize())


def q2_0_values(blocks, n, k):
    """ggml's dequantize_row_q2_0, as a formula."""
    rows = blocks.view(-1, 18)
    scales = rows[:, :2].contiguous().view(torch.float16).float()
    codes = rows[:, 2:].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    return ((codes.flatten(1).float() - 1) * scales).view(n, k)


@pytest.mark.parametrize(
    ("make", "write", "message"),
    [
        (
            {"k": 512},
            lambda w: encode(w, TQ2_0, "a"),
            r"a: row 0, columns 0\.\.255 hold scales 0\.\d+, 0\.\d+; one for",
        ),
        ({"k": 512}, lambda w: encode(w, TQ1_0, "a"), r"one for 256 columns is needed"),
        ({"k": 256, "group_size": 32}, lambda w: encode(w, Q2_0, "a"), r"columns 0\.\.63 hold scales"),
        ({"group_size": -1, "top": 3}, lambda w: encode(w, TQ2_0, "a"), r"a: weight\[0, \d+\] is 2 times its scale"),
        ({}, lambda w: bitnet.write(w, "a"), r"a: row 0, group 1 has scale 0\.\d+, others 0\.\d+"),
        ({"group_size": -1, "top": 3}, lambda w: bitnet.write(w, "a"), r"a is not ternary: code 3 at \[0, \d+\]"),
        ({"n": 30}, lambda w: bitnet.write(w, "a"), "30 rows; BitNet's format packs four"),
        ({"zero": 1.5, "top": 3}, lambda w: encode(w, Q2_0, "a"), r"a: row 0, group 0 has zero point 1\.5"),
        ({"zero": 1.5, "top": 3}, lambda w: compressed_tensors.write(w, "a"), r"row 0, group 0 has zero point 1\.5"),
        ({"zero": 1.5, "top": 3}, lambda w: mlx.write(w, "a"), r"row \d+, group \d needs bias -0\.\d+, which fp16"),
        ({"k": 48, "group_size": -1}, lambda w: mlx.write(w, "a"), "do not fit 48 columns"),
    ],
)
def test_what_a_format_does_not_hold_is_refused_with_its_values(ternary, make, write, message):
    with pytest.raises(QuantizationError, match=message):
        write(ternary(**make))


def test_groups_of_zeros_take_any_scale():
    codes = torch.ones(1, 256, dtype=torch.uint8)
    codes[0, 130] = 2
    weight = Quantized(codes, torch.tensor([[0.5, 0.25]]).half(), None, QuantSpec(128, 1.0))
    assert encode(weight, TQ2_0)[0, -2:].view(torch.float16) == 0.25


@pytest.mark.parametrize("make", [{}, {"zero": 2.0, "top": 3}, {"group_size": -1}])
def test_compressed_tensors_itself_reads_what_is_written(library, ternary, make):
    library("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = ternary(**make)
    tensors, facts = compressed_tensors.write(weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**facts))
    state = {name.removeprefix("."): tensor for name, tensor in tensors.items()}
    found = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(found.float(), weight.dequantize())


@pytest.mark.parametrize("make", [{}, {"zero": 2.0}, {"group_size": 64}])
def test_mlx_itself_reads_what_is_written(library, ternary, make):
    mx = library("mlx.core")
    weight = ternary(**make)
    tensors, facts = mlx.write(weight)
    parts = [mx.array(tensors[f".{part}"].numpy()) for part in ("weight", "scales", "biases")]
    found = mx.dequantize(*parts, group_size=facts["group_size"], bits=2)
    assert np.array_equal(np.array(found.astype(mx.float32)), weight.dequantize().numpy())


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_itself_packs_a_router_in_more_bits(library, model_dir, bits):
    mx = library("mlx.core")
    dense = torch.randn(16, 128, generator=torch.Generator().manual_seed(bits)).half()
    made = mx.quantize(mx.array(dense.numpy()), group_size=64, bits=bits)
    tensors = {part: torch.from_numpy(np.array(made[i])) for i, part in enumerate(("weight", "scales", "biases"))}
    expected = np.array(mx.dequantize(*made, group_size=64, bits=bits).astype(mx.float32))
    section = {"group_size": 128, "bits": 2, "a.mlp.gate": {"group_size": 64, "bits": bits}}
    source = model_dir({f"mlp.gate.{part}": tensor for part, tensor in tensors.items()}, quantization=section)
    assert np.array_equal(mlx.MlxWeights.of(source).dense("a.mlp.gate").numpy(), expected)
