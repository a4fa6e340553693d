"""The CPU kernels, every instruction set of this machine: against float64, against each other bit for bit, at the edges
of int32 and of the buffers they are given."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from ctypes import byref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trirun_kernels import native
from trirun_kernels.gemm import cpu, reference
from trirun_kernels.gemm.activations import int2_gemm_quantized, quantize_activations
from trirun_kernels.gemm.activations_cpu import integer_scales, integers
from trirun_kernels.gemm.ops import int2_gemm
from trirun_kernels.weights.packing import PackedWeight, dequantize, pack
from trirun_kernels.weights.spec import QuantSpec

from tests.kernels.gemm.cpu_support import rounding_of_limbs, run_guarded

if cpu.backend() == "reference":
    pytest.skip("libtrirun_cpu is not built: python scripts/trirun_build.py cpu", allow_module_level=True)

LIBRARY = native.cpu()
ALL_ISAS = ("portable", "avx2", "avx512vnni", "amx")
BEST = cpu.backend()


def available(isa: str) -> bool:
    found = LIBRARY.trirun_cpu_set_isa(isa.encode()) == 0
    LIBRARY.trirun_cpu_set_isa(BEST.encode())
    return found


ISAS = [isa for isa in ALL_ISAS if available(isa)]


@pytest.fixture(params=ALL_ISAS)
def isa(request):
    if request.param not in ISAS:
        pytest.skip(f"this machine has no {request.param}")
    LIBRARY.trirun_cpu_set_isa(request.param.encode())
    yield request.param
    LIBRARY.trirun_cpu_set_isa(BEST.encode())


def random_weight(n, k, spec, generator) -> PackedWeight:
    groups = (n, spec.groups(k))
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
    scales = (0.1 * torch.randn(groups, generator=generator)).half()
    zeros = (3 * torch.rand(groups, generator=generator)).half() if spec.zero is None else None
    return pack(codes, scales, spec, zeros)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(x, w, bias=None, act_bits=16):
    inputs = x.double() if act_bits == 16 else reference.int8_round_trip(x.float()).double()
    y = inputs @ dequantize(w, torch.float64).T
    return y if bias is None else y + bias.double()


ROUNDING = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    blocks=st.integers(1, 20),
    ragged=st.integers(0, 31),
    m=st.integers(1, 40),
    group_size=st.sampled_from([-1, 32, 64, 128]),
    zero=st.sampled_from([1.0, 1.5, 2.0, None]),
    dtype=st.sampled_from(list(ROUNDING)),
    act_bits=st.sampled_from([8, 16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_grid(n, blocks, ragged, m, group_size, zero, dtype, act_bits, bias, seed):
    k = max(group_size, 1) * blocks if group_size > 0 else 32 * blocks + ragged
    generator, spec = seeded(seed), QuantSpec(group_size, zero)
    w = random_weight(n, k, spec, generator)
    x = torch.randn(m, k, generator=generator)
    # Outliers as language models have them: a few channels thirty times the rest.
    x[:, torch.randint(0, k, (1 + k // 200,), generator=generator)] *= 30
    x = x.to(dtype)
    b = torch.randn(n, generator=generator).to(dtype) if bias else None
    want = exact(x, w, b, act_bits)
    results = []
    for name in ISAS:
        LIBRARY.trirun_cpu_set_isa(name.encode())
        results.append(run_guarded(x, w, b, act_bits, ldx=k + seed % 3, ldy=n + seed % 5))
    LIBRARY.trirun_cpu_set_isa(BEST.encode())
    # Relative to what the sums would be if signs were random: one output alone may cancel to nothing.
    size = (x.double().square() @ dequantize(w, torch.float64).square().T).sum().sqrt()
    size += 0 if b is None else b.double().norm() * math.sqrt(m)
    error, limbs = (results[0].double() - want).norm(), rounding_of_limbs(x, w) if act_bits == 16 else 0
    # The fewer rows, whose outputs share an error, the further it may be from the root of the mean square.
    limbs = 1.2 * (1 + 3.5 / math.sqrt(m)) * limbs
    if m * n >= 100 and act_bits == 16:
        limbs = min(limbs, 3e-4 * size)
    assert error <= ROUNDING[dtype] * size + limbs, (error, size, limbs)
    for name, result in zip(ISAS, results, strict=True):
        assert torch.equal(result, results[0]), f"{name} differs from {ISAS[0]}"


@pytest.mark.parametrize("act_bits", [8, 16])
@pytest.mark.parametrize("group_size", [-1, 32, 128])
def test_row_is_the_same_alone_in_a_batch_and_on_any_threads(isa, group_size, act_bits):
    generator, spec = seeded(1), QuantSpec(group_size, 1.5)
    w = random_weight(300, 1152, spec, generator)
    x = torch.randn(259, 1152, generator=generator)  # more rows than one block of any kernel
    whole = run_guarded(x, w, None, act_bits)
    for m in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 49):
        assert torch.equal(run_guarded(x[:m], w, None, act_bits), whole[:m]), m
    assert torch.equal(run_guarded(x[200:201], w, None, act_bits), whole[200:201])
    for threads in (1, 3, 7):
        assert torch.equal(run_guarded(x, w, None, act_bits, threads), whole)
        assert torch.equal(run_guarded(x[:1], w, None, act_bits, threads), whole[:1])


@pytest.mark.parametrize(("k", "group_size"), [(4096, -1), (28672, -1), (28672, 32), (28672, 128), (40960, -1)])
def test_extremes_do_not_overflow(isa, k, group_size):
    """Every code 3, every limb +-127, and the zero point that adds to it: the sums that overflow 16 bits, and would
    overflow 32 if the row blocks' factor 4^j were left in for too long."""
    w = pack(torch.full((64, k), 3, dtype=torch.uint8), torch.ones(64, k // group_size if group_size > 0 else 1),
             QuantSpec(group_size, -2.0))  # fmt: skip
    x = torch.ones(17, k)
    x[1::2] = -1
    x[2, : k // 3] = -1
    for m in (1, 3, 17):
        for act_bits in (8, 16):
            y = run_guarded(x[:m], w, None, act_bits)
            torch.testing.assert_close(y.double(), exact(x[:m], w, None, act_bits), rtol=3e-5, atol=0)


def test_minus_128_is_summed_exactly(isa):
    """A limb of -128 cannot come from quantize, but the interface allows it."""
    w = pack(torch.full((64, 28672), 3, dtype=torch.uint8), torch.ones(64, 1), QuantSpec(-1, 0.0))
    for m in (1, 6, 33):
        act = quantize_activations(torch.ones(m, 28672), 8)
        act[: m * 28672] = 0x80
        y = int2_gemm_quantized(act, m, w, act_bits=8, dtype=torch.float32)
        assert torch.equal(y, torch.full((m, 64), -3 * 128.0 * 28672) / 127)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("k", [77, 128, 1000])
def test_limbs_are_those_of_the_reference(isa, k, dtype):
    generator = seeded(k)
    x = torch.randn(40, k, generator=generator)
    # Rows made of ties: multiples of half a limb, which the division leaves exact or just beside.
    steps = torch.randint(-254, 255, (20, k), generator=generator)
    steps[:, 0] = 254
    x[:20] = steps * torch.rand(20, 1, generator=generator)
    x[20] = 0
    x[21] *= 1e-9
    x[22] *= 1e4 if dtype == torch.float16 else 1e30
    x = x.to(dtype)
    act = quantize_activations(x, 8)
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    found = integers(act, 40, k, 8)
    assert torch.equal(integer_scales(act, 40, k, 8), scale)
    assert torch.equal(found, (x.float() / scale).round().clamp(-128, 127).int())
    assert torch.equal(found * scale, reference.int8_round_trip(x.float()))


def test_two_limbs_hold_15_bits(isa):
    x = torch.randn(9, 700, generator=seeded(3)) * 10.0 ** torch.arange(-20, 16, 4).unsqueeze(1)
    act = quantize_activations(x, 16)
    found = integers(act, 9, 700, 16)
    scales = integer_scales(act, 9, 700, 16).repeat_interleave(128, dim=1)[:, :700]
    assert ((found.double() * scales - x.double()).abs() <= scales.double() * 0.51).all()
    assert found.abs().max() == 32639


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("act_bits", [8, 16])
def test_not_a_number_spoils_its_row_and_no_other(isa, act_bits, dtype, bad):
    for group_size in (-1, 64):
        w = random_weight(70, 576, QuantSpec(group_size, 1.0), seeded(4))
        x = torch.randn(20, 576, generator=seeded(5)).to(dtype)
        clean = run_guarded(x, w, None, act_bits)
        for column in (0, 300, 575):
            y = x.clone()
            y[7, column] = bad
            result = run_guarded(y, w, None, act_bits)
            assert result[7].isnan().all()
            assert torch.equal(result[:7], clean[:7]) and torch.equal(result[8:], clean[8:])
            assert run_guarded(y[7:8], w, None, act_bits).isnan().all()


def test_quantized_once_is_the_same(isa):
    generator = seeded(6)
    x = torch.randn(10, 200, generator=generator).half()
    for act_bits in (8, 16):
        act = quantize_activations(x, act_bits)
        for n in (64, 130):
            w = random_weight(n, 200, QuantSpec(-1, 1.0), generator)
            bias = torch.randn(n, generator=generator).half()
            want = int2_gemm(x, w, bias, act_bits=act_bits)
            assert torch.equal(int2_gemm_quantized(act, 10, w, bias, act_bits=act_bits), want)
    with pytest.raises(ValueError, match=r"bias must be torch.float16 \[130\] on cpu, got .* on meta"):
        int2_gemm_quantized(act, 10, w, bias.to("meta"), act_bits=8)
    with pytest.raises(ValueError, match="activations on meta, weight on cpu"):
        int2_gemm_quantized(act.to("meta"), 10, w)


def test_operator_on_views_and_empty_batches(isa):
    w = random_weight(100, 256, QuantSpec(128, None), seeded(7))
    x = torch.randn(3, 4, 512, generator=seeded(8))
    for view in (x[..., :256], x[..., ::2], x.transpose(0, 1)[..., 256:], x[:1, :1, :256].expand(5, 2, 256)):
        assert torch.equal(int2_gemm(view, w), int2_gemm(view.contiguous(), w))
    assert int2_gemm(torch.empty(0, 256), w).shape == (0, 100)
    assert int2_gemm(torch.empty(2, 0, 256), w).shape == (2, 0, 100)
    assert torch.equal(int2_gemm(x[0, 0, :256], w), int2_gemm(x[0, :1, :256], w)[0])


@pytest.mark.parametrize(
    ("change", "code"),
    [({"n": 65}, -1), ({"k": 130}, -1), ({"group_size": 16}, -3), ({"words": None}, -2), ({"n": 0}, -1)],
)
def test_bad_weights_are_refused(change, code):
    w = random_weight(64, 128, QuantSpec(-1, 1.0), seeded(9))
    struct = native.Int2Struct.of(w)
    for field, value in change.items():
        setattr(struct, field, value)
    x, y = torch.zeros(1, 128), torch.zeros(1, 64)
    run = native.cpu().trirun_cpu_int2_gemm
    assert run(byref(struct), 64, 128, x.data_ptr(), 0, 1, 128, None, y.data_ptr(), 64, 8, 1) == code


@pytest.mark.parametrize(
    ("arguments", "code"),
    [({"k": 129}, -1), ({"n": 65}, -1), ({"m": -1}, -1), ({"ldx": 100}, -1), ({"ldy": 60}, -1), ({"threads": 0}, -1),
     ({"dtype": 7}, -3), ({"act_bits": 4}, -3), ({"x": None}, -2), ({"y": None}, -2), ({"m": 0, "x": None}, 0)],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments, code):
    w = random_weight(64, 128, QuantSpec(-1, 1.0), seeded(9))
    x, y = torch.zeros(1, 128), torch.zeros(1, 64)
    given = {"n": 64, "k": 128, "x": x.data_ptr(), "dtype": 0, "m": 1, "ldx": 128, "bias": None, "y": y.data_ptr(),
             "ldy": 64, "act_bits": 8, "threads": 1}  # fmt: skip
    assert native.cpu().trirun_cpu_int2_gemm(byref(native.Int2Struct.of(w)), *(given | arguments).values()) == code


def test_environment_chooses_the_instruction_set():
    program = "from trirun_kernels.gemm import cpu; print(cpu.backend())"
    for name in ISAS[:1]:
        environment = os.environ | {"TRIRUN_CPU_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == name, done.stderr
    environment["TRIRUN_CPU_ISA"] = "sse9"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode and "TRIRUN_CPU_ISA=sse9" in done.stderr
    program = "from trirun_kernels import native; native.load('cpu')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode and "TRIRUN_CPU_ISA=sse9" in done.stderr
    assert LIBRARY.trirun_cpu_set_isa(b"sse9") == -3 and cpu.backend() == BEST


def test_pool_survives_fork_and_serves_concurrent_callers():
    """A forked child has none of the pool's threads; two Python threads call at once (the calls release the GIL)."""
    from concurrent.futures import ThreadPoolExecutor

    w = random_weight(512, 512, QuantSpec(-1, 1.0), seeded(10))
    x = torch.randn(12, 512, generator=seeded(11))
    want = run_guarded(x, w, None, 8)
    with ThreadPoolExecutor(4) as callers:
        for result in callers.map(lambda _: run_guarded(x, w, None, 8), range(64)):
            assert torch.equal(result, want)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run_guarded(x, w, None, 8), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
