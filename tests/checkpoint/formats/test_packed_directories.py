"""Directories packed by other libraries: the values are those that the libraries read, bit for bit."""

import pytest
import torch

from trirun_cli.checkpoint.formats import open_foreign
from trirun_cli.errors import InputError

MLX = {"quantization": {"group_size": 128, "bits": 2, "mode": "affine"}}
WEIGHTS = {"num_bits": 2, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
ASYMMETRIC = WEIGHTS | {"symmetric": False}


def compressed_tensors(weights=WEIGHTS, **change):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"quantization_config": section | change}


def gptq(**change):
    section = {"quant_method": "gptq", "bits": 2, "group_size": 128, "desc_act": False}
    return {"quantization_config": section | change}


def auto_round(form):
    return gptq(quant_method="auto-round", packing_format=form)


def humming(**change):
    section = {"quant_method": "humming", "b_dtype": "uint2", "weight_scale_type": "group", "has_zero_point": False}
    return {"quantization_config": section | {"weight_scale_group_size": 128} | change}


def bitnet(**change):
    return {"quantization_config": {"quant_method": "bitnet"} | change}


@pytest.mark.parametrize(
    ("name", "config", "exact"),
    [
        ("mlx_2bit_bonsai_g128", MLX, True),
        ("mlx_2bit_affine_g128", MLX, False),
        ("ct_int2_sym_g128", compressed_tensors(), True),
        ("ct_int2_full_g128", compressed_tensors(), True),
        ("ct_int2_asym_g128", compressed_tensors(ASYMMETRIC), False),
        ("humming_uint2_g128", humming(), True),
        ("gptq2_v1_g128", gptq(), True),
        ("gptq2_v1_g128", gptq(checkpoint_format="gptq"), True),
        ("gptq2_v2_g128", gptq(checkpoint_format="gptq_v2"), True),
        ("gptq2_v1_g128", auto_round("auto_round:auto_gptq"), True),
        ("gptq2_v2_g128", auto_round("auto_round"), True),
        ("gptq2_v2_g128", auto_round("auto_round:gptqmodel"), True),
        ("bitnet_bitlinear", bitnet(), True),
        ("bitnet_bitlinear", bitnet(linear_class="bitlinear"), True),
        ("bitnet_autobitlinear", bitnet(linear_class="autobitlinear"), True),
    ],
)
def test_a_file_of_another_library_has_the_values_of_that_library(foreign_file, model_dir, name, config, exact):
    tensors, expected = foreign_file(name)
    weights = open_foreign(model_dir(tensors, **config))
    assert torch.equal(weights.dense("a"), expected)
    weight, error = weights.read("a")
    # "exact" ones: the library itself rounds nothing; the others round their own product once more.
    tolerance = 0 if exact else 2.0**-7
    difference = ((weight.dequantize() - expected).abs() / expected.abs().clamp(min=1e-9)).max()
    assert difference <= tolerance + error and error <= (0 if "bitnet" not in name else 2.0**-11)
    assert weights.packed("a.bias") is None and {weights.packed(f"a.{name}") for name in tensors} == {"a"}


def test_the_grid_of_a_ternary_file_is_the_plainest(foreign_file, model_dir):
    for name, config in (("mlx_2bit_bonsai_g128", MLX), ("ct_int2_sym_g128", compressed_tensors())):
        weight, error = open_foreign(model_dir(foreign_file(name)[0], **config)).read("a")
        assert (weight.spec.zero, weight.spec.group_size, error) == (1.0, 128, 0) and weight.codes.max() == 2
    weight, _ = open_foreign(model_dir(foreign_file("ct_int2_full_g128")[0], **compressed_tensors())).read("a")
    assert weight.spec.zero == 2.0


@pytest.mark.parametrize(
    ("name", "config"),
    [("gptq2_v2_g128", gptq(sym=True)), ("gptq2_v1_g128", gptq(sym=True, checkpoint_format="gptq_v2"))],
)
def test_the_wrong_version_of_gptq_is_refused_by_its_zero_points(foreign_file, model_dir, name, config):
    tensors, _ = foreign_file(name)
    # All zero points 2, as of a symmetric model.
    tensors["qzeros"].fill_(0x55555555 if "v1" in name else 0xAAAAAAAA - 2**32)
    with pytest.raises(Exception, match=r"sym is true, but its zero points are [13] instead of 2"):
        open_foreign(model_dir(tensors, **config)).read("a")
    del config["quantization_config"]["sym"]
    with pytest.raises(Exception, match="checkpoint_format names the wrong version"):
        tensors["qweight"].fill_(0xAAAAAAAA - 2**32)
        open_foreign(model_dir(tensors, **config)).read("a")


def test_a_borrow_between_zero_points_of_version_1(foreign_file, model_dir):
    """Version 1 stores words of version 2 less 0x55555555: a zero point 0 borrows from its neighbour."""
    tensors, _ = foreign_file("gptq2_v2_g128")
    tensors["qzeros"] = torch.randint(-(2**31), 2**31, tensors["qzeros"].shape).to(torch.int32)
    second = open_foreign(model_dir(tensors, **gptq(checkpoint_format="gptq_v2"))).dense("a")
    tensors["qzeros"] = (tensors["qzeros"].long() - 0x55555555).to(torch.int32)
    assert torch.equal(open_foreign(model_dir(tensors, **gptq())).dense("a"), second)


def test_columns_out_of_order_are_refused(foreign_file, model_dir):
    tensors, _ = foreign_file("gptq2_v2_g128")
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(Exception, match=r"a: g_idx puts columns into groups out of order \(desc_act\)"):
        open_foreign(model_dir(tensors, **gptq(checkpoint_format="gptq_v2", desc_act=True))).read("a")


@pytest.mark.parametrize(
    ("name", "config"), [("ct_int2_sym_g128", compressed_tensors()), ("humming_uint2_g128", humming())]
)
def test_codes_that_count_from_minus_one_are_refused(foreign_file, model_dir, name, config):
    tensors, _ = foreign_file(name)
    words = next(key for key in tensors if tensors[key].dtype == torch.int32)
    # The words of MLX: every code is one less.
    tensors[words] = (tensors[words].long() - 0x55555555).to(torch.int32)
    with pytest.raises(Exception, match="they count from −1, as MLX's do"):
        open_foreign(model_dir(tensors, **config)).read("a")


@pytest.mark.parametrize(
    ("name", "said"), [("bitnet_bitlinear", "autobitlinear"), ("bitnet_autobitlinear", "bitlinear")]
)
def test_a_reciprocal_scale_is_refused(foreign_file, model_dir, name, said):
    tensors, _ = foreign_file(name)
    tensors["weight_scale"].fill_(0.03 if "auto" in name else 1 / 0.03)
    with pytest.raises(Exception, match="no trained layer has such; the other class is probably meant"):
        open_foreign(model_dir(tensors, **bitnet(linear_class=said))).read("a")


def test_a_bias_that_is_no_multiple_of_the_scale_is_named(foreign_file, model_dir):
    tensors, _ = foreign_file("mlx_2bit_affine_g128")
    tensors["scales"][3, 1], tensors["biases"][3, 1] = 0.1, -0.0777
    with pytest.raises(
        Exception, match=r"a: row 3, group 1 has scale 0\.09\d+ and bias -0\.07\d+: the bias is no exact"
    ):
        open_foreign(model_dir(tensors, **MLX)).read("a")
    # One that is, is kept: a zero point of its own.
    tensors["scales"][3, 1], tensors["biases"][3, 1] = 0.125, -0.15625
    weight, error = open_foreign(model_dir(tensors, **MLX)).read("a")
    assert weight.spec.zero is None and weight.zeros[3, 1] == 1.25 and error == 0
    assert torch.equal(weight.dequantize()[3, 128:], open_foreign(model_dir(tensors, **MLX)).dense("a")[3, 128:])


def test_a_group_of_zeros_takes_the_zero_point_of_its_matrix(foreign_file, model_dir):
    tensors, _ = foreign_file("mlx_2bit_bonsai_g128")
    tensors["scales"][5, 0] = tensors["biases"][5, 0] = 0
    weight, error = open_foreign(model_dir(tensors, **MLX)).read("a")
    assert weight.spec.zero == 1.0 and error == 0 and not weight.dequantize()[5, :128].any()


def test_a_scale_of_bfloat16_that_fp16_rounds_is_measured(foreign_file, model_dir):
    tensors, _ = foreign_file("humming_uint2_g128")
    for scale, expected in ((2.0**-17 * 1.0078125, 0), (2.0**-18 * 1.5078125, 2.0**-25 / (2.0**-18 * 1.5078125))):
        tensors["weight_scale"][2, 1] = scale
        assert open_foreign(model_dir(tensors, **humming())).read("a")[1] == expected
    tensors["weight_scale"][2, 1] = 1e-9
    with pytest.raises(Exception, match=r"a: row 2, group 1 has scale .*e-10, outside fp16's range"):
        open_foreign(model_dir(tensors, **humming())).read("a")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "a has 4 bits"),
        ({"quantization": {"group_size": 32, "bits": 2, "mode": "mxfp4"}}, "mode 'mxfp4'"),
        ({"quantization": {"group_size": 128, "bits": 2, "a": {"bits": 3}}}, "a has 3 bits"),
        (MLX | {"model_type": "prism_hadamard_qwen35"}, "rotated"),
        (compressed_tensors(WEIGHTS | {"num_bits": 4}), "num_bits is 4"),
        (compressed_tensors(format="marlin-24"), "format is 'marlin-24'"),
        (compressed_tensors(WEIGHTS | {"strategy": "tensor"}), "strategy is 'tensor'"),
        (gptq(bits=4), "bits is 4"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (auto_round("auto_round:awq"), "packing_format is 'auto_round:awq'"),
        (humming(b_dtype="uint4"), "b_dtype is 'uint4'"),
        (humming(has_zero_point=True), "has_zero_point is True"),
        (bitnet(quantization_mode="online"), "layers of linear_class 'bitlinear' are always packed"),
        (bitnet(linear_class="autobitlinear", quantization_mode="lazy"), "quantization_mode is 'lazy'"),
    ],
)
def test_a_variant_that_is_not_read_is_named(model_dir, config, message):
    tensors = {"weight": torch.zeros(4, 16, dtype=torch.int32), "scales": torch.ones(4, 2).half()}
    with pytest.raises(InputError, match=message):
        open_foreign(model_dir(tensors, **config))


def test_latent_weights_of_online_layers_are_those_that_transformers_computes(model_dir):
    from trirun_gptq.lossless.bitnet import online_trits

    master = (torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * 0.05).bfloat16()
    online = bitnet(linear_class="autobitlinear", quantization_mode="online")
    weights = open_foreign(model_dir({"weight": master}, **online))
    weight, error = weights.read("a")
    values = master.float()
    scale = 1.0 / values.abs().mean().clamp_(min=1e-5)  # WeightQuant.forward of transformers, which it compiles
    expected = ((values * scale).round().clamp(-1, 1) / scale).to(torch.bfloat16).float()
    assert error == 0 and torch.equal(weight.dequantize(), expected) and torch.equal(weights.dense("a"), expected)
    with pytest.raises(Exception, match="latent weights are finite floats"):
        online_trits(torch.zeros(4, 4, dtype=torch.uint8))
