"""ternarize: every scale structure is found from the data, reproduced bit for bit, and anything else is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trirun_gptq.errors import QuantizationError
from trirun_gptq.lossless.ternary import scale_structure, ternarize
from trirun_kernels import dequantize

TERNARY_MODEL = Path(__file__).parents[4] / "shared" / "models" / "bookshelf-28m-ternary" / "model.safetensors"


def ternary_weight(n, k, group, dtype=torch.float16, seed=0, per_tensor=False):
    """A ternary [n, k] weight with a scale per `group` columns (-1: per row, or one for all)."""
    generator = torch.Generator().manual_seed(seed)
    size = k if group == -1 else group
    trits = torch.randint(-1, 2, (n, k // size, size), generator=generator).to(dtype)
    structure = (1, 1, 1) if per_tensor else (n, k // size, 1)
    scales = (torch.rand(structure, generator=generator) + 0.01).to(dtype)
    return (trits * scales).view(n, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "per_tensor", "structure"),
    [(-1, True, "tensor"), (-1, False, "row"), (128, False, "128"), (64, False, "64"), (32, False, "32")],
)
def test_finds_the_coarsest_structure_and_reproduces_the_source(dtype, group, per_tensor, structure):
    weight = ternary_weight(24, 256, group, dtype, per_tensor=per_tensor)
    found = ternarize(weight)
    assert scale_structure(found) == structure
    assert found.spec.group_size == group
    assert torch.equal(found.dequantize(dtype), weight)
    assert torch.equal(dequantize(found.pack(), dtype), weight)
    assert set(found.codes.unique().tolist()) <= {0, 1, 2}


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    blocks=st.integers(1, 5),
    group=st.sampled_from([-1, 32, 64, 128]),
    seed=st.integers(0, 10_000),
)
def test_round_trip_for_any_shape(n, blocks, group, seed):
    k = blocks * (32 if group == -1 else group)
    weight = ternary_weight(n, k, group, seed=seed)
    assert torch.equal(dequantize(ternarize(weight).pack(), torch.float16), weight)


def test_row_length_that_no_group_divides():
    weight = ternary_weight(8, 50, -1)
    assert torch.equal(ternarize(weight).dequantize(torch.float16), weight)


def test_groups_and_rows_of_zeros():
    weight = ternary_weight(8, 256, -1, per_tensor=True)
    weight[3] = 0
    weight[4, :128] = -0.0
    found = ternarize(weight)
    assert scale_structure(found) == "tensor"
    assert torch.equal(found.dequantize(torch.float16), weight)
    assert torch.equal(ternarize(torch.zeros(4, 64)).dequantize(), torch.zeros(4, 64))


def test_float32_source_needs_fp16_scales():
    exact = ternary_weight(4, 64, -1, torch.float16).float()
    assert torch.equal(ternarize(exact).dequantize(), exact)
    with pytest.raises(QuantizationError, match=r"q_proj: row 0, group 0 has scale 0\.1\d*, which fp16 cannot hold"):
        ternarize(torch.full((2, 64), 0.1), "q_proj")


def test_refusal_names_the_worst_offender():
    weight = ternary_weight(16, 256, 128)
    weight[5, 70:74] = torch.tensor([0.25, 0.5, 0.75, 2.0], dtype=torch.float16)
    weight[9, 3] = 3.0
    with pytest.raises(QuantizationError) as caught:
        ternarize(weight, "layers.0.up_proj")
    message = str(caught.value)
    assert "layers.0.up_proj [16, 256] is not ternary: 2 of 128 groups" in message
    assert "row 5, group 2 (columns 64..95)" in message
    assert "(5 in all)" in message


def test_dense_and_broken_weights_are_refused():
    with pytest.raises(QuantizationError, match="is not ternary: 8 of 8 groups"):
        ternarize(torch.randn(4, 64))
    with pytest.raises(QuantizationError, match=r"v_proj: weight\[1, 2\] = nan is not finite"):
        broken = ternary_weight(4, 64, -1)
        broken[1, 2] = float("nan")
        ternarize(broken, "v_proj")
    with pytest.raises(QuantizationError, match="floating-point weight is needed"):
        ternarize(torch.zeros(4, 64, dtype=torch.int8))


@pytest.mark.skipif(not TERNARY_MODEL.exists(), reason=f"{TERNARY_MODEL} is not here")
def test_every_matrix_of_a_trained_ternary_model():
    from safetensors import safe_open

    with safe_open(TERNARY_MODEL, "pt") as file:
        names = [name for name in sorted(file.keys()) if name.endswith("_proj.weight")]
        assert len(names) == 8 * 7
        for name in names:
            weight = file.get_tensor(name)
            found = ternarize(weight, name)
            assert scale_structure(found) == "tensor"
            assert torch.equal(dequantize(found.pack(), weight.dtype), weight)
