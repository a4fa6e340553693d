"""The operator contract: reference values, schema, fake tensors, autograd, torch.compile, Int2Linear."""

import pytest
import torch
from trirun_kernels import QuantSpec, dequantize, native, pack
from trirun_kernels.gemm import cpu, reference
from trirun_kernels.gemm.activations import int2_gemm_quantized, quantize_activations
from trirun_kernels.gemm.linear import Int2Linear
from trirun_kernels.gemm.ops import int2_gemm


def make(n=70, k=160, spec=None, seed=0):
    spec = spec or QuantSpec(32)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.rand(n, spec.groups(k), generator=generator).half()
    zeros = torch.rand(n, spec.groups(k), generator=generator).half() if spec.zero is None else None
    return pack(codes, scales, spec, zeros)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("zero", [1.0, 1.5, None])
@pytest.mark.parametrize("shape", [(160,), (1, 160), (3, 160), (2, 5, 160), (0, 160)])
def test_matches_the_reference(shape, zero):
    w = make(spec=QuantSpec(32, zero))
    x = torch.randn(shape)
    y = int2_gemm(x, w, torch.ones(70))
    assert y.shape == (*shape[:-1], 70) and y.dtype == x.dtype
    if y.numel():
        assert relative(y, x @ dequantize(w).T + 1) < 1e-3
    assert int2_gemm(x.half(), w).dtype == torch.float16


def test_eight_bit_activations_follow_the_bitnet_rule():
    w, x = make(), torch.randn(4, 160)
    assert relative(int2_gemm(x, w, act_bits=8), reference.int2_gemm(x, w, act_bits=8)) < 1e-5


@pytest.mark.parametrize("act_bits", [8, 16])
def test_opcheck(act_bits):
    w = make()
    x, bias = torch.randn(3, 160, requires_grad=True), torch.randn(70, requires_grad=True)
    arguments = (x, w.words, w.scales, None, bias, w.n, w.k, 32, 1.0, act_bits)
    torch.library.opcheck(torch.ops.trirun.int2_gemm, arguments)


@pytest.mark.parametrize("act_bits", [8, 16])
def test_activations_quantized_apart(act_bits):
    if cpu.backend() == "reference":
        pytest.skip("libtrirun_cpu is not built: python scripts/trirun_build.py cpu")
    w, x, checks = make(), torch.randn(3, 160), ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.trirun.quantize_activations, (x, act_bits), test_utils=checks)
    act = quantize_activations(x, act_bits)
    arguments = (act, w.words, w.scales, None, None, w.n, w.k, 3, 32, 1.0, act_bits, torch.float32)
    torch.library.opcheck(torch.ops.trirun.int2_gemm_quantized, arguments, test_utils=checks)
    y = int2_gemm_quantized(act, 3, w, act_bits=act_bits, dtype=torch.float32)
    assert torch.equal(y, int2_gemm(x, w, act_bits=act_bits))
    with pytest.raises(native.NativeError, match="activations of 4 rows"):
        int2_gemm_quantized(act, 4, w, act_bits=act_bits, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 160\]"):
        quantize_activations(x.expand(2, 3, 160), act_bits)


def test_gradients_are_those_of_the_dense_layer():
    w = make()
    x, bias = torch.randn(3, 160, requires_grad=True), torch.randn(70, requires_grad=True)
    upstream = torch.randn(3, 70)
    int2_gemm(x, w, bias).backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ dequantize(w))
    torch.testing.assert_close(bias.grad, upstream.sum(0))


def test_compiles_into_one_graph():
    layer = Int2Linear.from_packed(make(), torch.randn(70))
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 160)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def test_wrong_arguments_name_their_numbers():
    w = make()
    cases = [
        (dict(x=torch.randn(3, 100)), r"x has shape \[3, 100\], the weight has k=160"),
        (dict(x=torch.randn(3, 160).double()), "torch.float64"),
        (dict(x=torch.randn(3, 160), act_bits=4), "act_bits=4"),
        (dict(x=torch.randn(3, 160), bias=torch.zeros(71)), r"bias must be torch.float32 \[70\]"),
        (dict(x=torch.randn(3, 160).half(), bias=torch.zeros(70)), "bias must be torch.float16"),
        (dict(x=torch.randn(3, 160, device="meta")), "x is on meta"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            int2_gemm(w=w, **arguments)


def test_int2linear_state_is_what_a_checkpoint_holds():
    layer = Int2Linear.from_packed(make(spec=QuantSpec(32, None)), torch.randn(70))
    state = layer.state_dict()
    assert {name: value.dtype for name, value in state.items()} == {
        "weight": torch.int32,
        "weight_scale": torch.float16,
        "weight_zero": torch.float16,
        "bias": torch.float32,
    }
    empty = Int2Linear(160, 70, QuantSpec(32, None), bias=True)
    empty.load_state_dict(state)
    x = torch.randn(2, 160)
    torch.testing.assert_close(empty(x), layer(x), rtol=0, atol=0)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize("bias", [torch.randn(70), None])
def test_a_packed_layer_becomes_a_dense_one(bias):
    layer = Int2Linear.from_packed(make(), bias)
    dense = layer.to_dense(torch.bfloat16)
    assert dense.weight.dtype == torch.bfloat16 and torch.equal(dense.weight, dequantize(layer.packed, torch.bfloat16))
    assert dense.bias is layer.bias and (dense.in_features, dense.out_features) == (160, 70)
    assert {"weight"} <= dense.state_dict().keys() and ("bias" in dense.state_dict()) == (bias is not None)
