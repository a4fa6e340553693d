"""--accumulate fp16: who may use it, and what a model does with it."""

import pytest
import torch
from trirun_kernels import QuantSpec, pack
from trirun_kernels.decoder.cuda_weights import Projection
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.f16acc.int2 import FEWEST_ROWS
from trirun_kernels.gemm.linear import Int2Linear
from trirun_kernels.gemm.ops import int2_gemm

from trirun_cli.backends import accumulation
from trirun_cli.backends.accumulation import Fp16Sums, check_accumulation, use_fp16_sums
from trirun_cli.errors import CheckFailed, InputError, UsageError
from trirun_cli.models.synthetic import random_model


@pytest.fixture
def weight():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 3, (64, 128), dtype=torch.uint8, generator=generator)
    return pack(codes, torch.rand(64, 1, generator=generator).half(), QuantSpec(128, 1.0))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of given facts, as far as the check looks."""

    def pretend(gain, error):
        monkeypatch.setattr(accumulation, "pick_device", lambda device: "cuda")
        monkeypatch.setattr(accumulation, "measure", lambda device: Fp16Sums("some GPU", gain, error, 5e-4))

    return pretend


def test_a_gpu_that_gains_and_is_accurate_may(gpu):
    gpu(2.0, 6e-4)
    check_accumulation("fp16", "cuda")


def test_a_gpu_that_gains_nothing_must_be_forced(gpu):
    gpu(1.0, 6e-4)
    with pytest.raises(UsageError, match="some GPU adds as fast in fp32"):
        check_accumulation("fp16", "cuda")
    check_accumulation("fp16-forced", "cuda")


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_errors_larger_than_the_reference_s_are_refused(gpu, error):
    gpu(2.0, error)
    with pytest.raises(CheckFailed, match="the reference has"):
        check_accumulation("fp16-forced", "cuda")


def test_not_on_a_cpu(trirun, plain_model):
    with pytest.raises(UsageError, match="for GPUs"):
        check_accumulation("fp16", "cpu")
    for value in ("fp16", "fp8"):
        code, out, err = trirun("generate", "-c", plain_model, "-p", "a", "--device", "cpu", "--accumulate", value)
        assert code == 2 and f"--accumulate {value}" in err and not out


def test_many_rows_add_in_fp16_and_few_do_not(weight):
    layer = Int2Linear.from_packed(weight)
    module = torch.nn.Sequential(layer)
    module.dtype = torch.float16
    assert use_fp16_sums(module) is module and layer.acc == "fp16"
    projection = Projection(weight, acc="fp16")
    many = torch.randn(FEWEST_ROWS, 128).half()
    with torch.no_grad():
        assert torch.equal(layer(many), int2_gemm(many, weight, acc="fp16"))
        assert torch.equal(projection(many), layer(many))
        assert torch.equal(layer(many[:3]), int2_gemm(many[:3], weight))
        assert layer(many.float()).dtype == torch.float32


def test_every_projection_of_the_native_decoder_is_told():
    shape = DecoderShape.uniform(layers=2, hidden=128, ffn=256, heads=2, kv_heads=1, head_dim=64, vocab=64)
    cpu = torch.device("cpu")
    model = random_model(shape, QuantSpec(-1, 1.0), positions=64, device=cpu, dtype=torch.float16)
    told = use_fp16_sums(model)
    assert [p.acc for layer in told.layers for p in layer.projections] == ["fp16"] * 8
    assert told.layers[1].o.weight is model.layers[1].o.weight and model.layers[1].o.acc == "fp32"


def test_only_models_in_float16():
    module = torch.nn.Linear(2, 2)
    module.dtype = torch.bfloat16
    with pytest.raises(InputError, match="not bfloat16"):
        use_fp16_sums(module)


def test_bench_with_fp16_sums(trirun, small_cache):
    quick = ("bench", "kernels", "--shapes", "64x256", "--m", "3", "--seconds", "0.001", "--device", "cpu", "-q")
    code, out, _ = trirun(*quick, "--accumulate", "fp16", "--dtype", "float16")
    assert code == 0 and "64 × 256" in out
    code, _, err = trirun(*quick, "--accumulate", "fp16")
    assert code == 2 and "--dtype float16" in err
