"""trirun_cuda_plan_shared_bytes: what a launch asks for, and -1 for exactly the plans that are refused. Launches are
made on GPUs that are only described (described_devices.py)."""

from __future__ import annotations

import ctypes
from itertools import product as combinations

import pytest
from trirun_kernels.native import DTYPES, Limits, PlanStruct
from trirun_kernels.plan.problem import PREFILL_W2A8, PREFILL_WGMMA, SPANS, STREAM, STREAM_SM80, Plan
from trirun_kernels.plan.select import select

from tests.kernels.described_devices import GPUS, built_archs, describe, link, product

ARCHS = built_archs()
pytestmark = pytest.mark.skipif(not ARCHS, reason="libtrirun_cuda.so was not built in this tree, or there is no nvcc")
CHOSEN = [gpu for gpu in GPUS if gpu.name in ("A100", "RTX-4090", "H200", "B200")]
HERE = [pytest.param(gpu, marks=pytest.mark.skipif(gpu.code not in ARCHS, reason="not built")) for gpu in CHOSEN]
on_every_gpu = pytest.mark.parametrize("gpu", HERE, ids=[gpu.name for gpu in CHOSEN])
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
needs_hopper = pytest.mark.skipif("90a" not in ARCHS, reason="not built")
SHAPES = [(4096, 4096), (57344, 8192), (8192, 28672), (2560, 6912), (512, 512), (64, 128), (192, 1152)]
NO_KERNEL = "no kernel for this plan"


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    return link(tmp_path_factory.mktemp("described"))


def shared_bytes(linked, shape, m, group, bits, plan, *, dtype="float16", zeros=False, quantized=False, arch=90):
    function = linked.trirun_cuda_plan_shared_bytes
    struct = PlanStruct(*plan)
    return function(*shape, m, group, zeros, bits, DTYPES[dtype], quantized, arch, ctypes.byref(struct))


def asked_for(linked, *of, **how) -> int:
    """Bytes of the product's launch; -1: no kernel."""
    told = product(linked, *of, **how)
    assert not told or told.startswith(NO_KERNEL), (of, how, told)
    linked.described_shared.restype = ctypes.c_int64
    return -1 if told else linked.described_shared(linked.described_launches() - 1)


@on_every_gpu
def test_launches_take_what_plans_say(linked, gpu):
    describe(linked, gpu)
    seen = set()
    for shape, m, group, bits in combinations(SHAPES, (1, 2, 3, 8, 9, 16, 33, 64, 600), (-1, 32, 128), (8, 16)):
        for dtype, quantized, zeros in (("float16", 0, 0), ("bfloat16", 0, 0), ("float16", 0, 1), ("float16", 1, 0)):
            how = {"dtype": dtype, "quantized": bool(quantized), "zeros": bool(zeros)}
            try:
                plan = select(*shape, m, group, bits, gpu.device, plain=not zeros, quantized=bool(quantized))
            except ValueError:  # such rows fit no decode kernel
                continue
            of = (shape, m, group, bits, plan)
            assert 0 < shared_bytes(linked, *of, **how, arch=gpu.arch) == asked_for(linked, *of, **how), (of, how)
            seen.add(plan.kernel)
    assert len(seen) == (5 if gpu.arch == 90 else 2)


# Changes to a plan, most of which leave no kernel for it.
CHANGES = [{"stages": s} for s in (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 17)]
CHANGES += [{"cta_split": s} for s in (0, 1, 2, 3, 4, 8, 16)] + [{"tile_m": t} for t in (0, 16, 32, 64, 128, 256)]
CHANGES += [{"tile_n": t} for t in (0, 128, 192, 256)] + [{"ctas": c} for c in (0, 1, 7, 64, 128, 132, 5000)]
CHANGES += [{"warps": w, "warp_split": s} for w, s in ((0, 1), (4, 1), (8, 8), (12, 4), (16, 16), (32, 4))]
CHANGES += [{"fused": f} for f in (0, 1)] + [{"early": 3, "x_first": x} for x in (-1, 3, 4)]


@needs_hopper
@pytest.mark.parametrize("shape", [(4096, 4096), (2560, 6912), (1024, 28672), (64, 128)], ids=str)
def test_plans_without_a_kernel_are_told_before_the_launch(linked, shape):
    describe(linked, H200)
    refused = 0
    for m, group, bits, quantized in combinations((1, 8, 16, 48, 200), (-1, 64, 128), (8, 16), (False, True)):
        if quantized and m > 64:
            continue
        plan = select(*shape, m, group, bits, H200.device, quantized=quantized)
        for change in CHANGES:
            for kernel in (plan.kernel, STREAM, STREAM_SM80, SPANS) if m <= 64 else (PREFILL_WGMMA, PREFILL_W2A8):
                of = (shape, m, group, bits, plan._replace(kernel=kernel, **change))
                said = shared_bytes(linked, *of, quantized=quantized)
                assert said == asked_for(linked, *of, quantized=quantized), (of, quantized)
                refused += said < 0
        linked.described_clear()
    assert refused > 1000


@needs_hopper
def test_what_no_kernel_takes(linked):
    plan = select(4096, 4096, 1, -1, 16, H200.device)
    assert shared_bytes(linked, (4096, 4096), 1, -1, 16, plan) > 0
    assert shared_bytes(linked, (4096, 4096), 1, -1, 16, plan, arch=75) == -1
    for shape, m, group, bits in (
        ((4095, 4096), 1, -1, 16),
        ((4096, 4100), 1, -1, 16),
        ((0, 4096), 1, -1, 16),
        ((4096, 4096), 0, -1, 16),
        ((4096, 4096), 129, -1, 16),
        ((4096, 4096), 1, 16, 16),
        ((4096, 4096), 1, -1, 4),
    ):
        assert shared_bytes(linked, shape, m, group, bits, plan) == -1
    assert shared_bytes(linked, (4096, 4096), 1, -1, 16, Plan(99)) == -1


@needs_hopper
def test_limits(linked):
    limits = Limits()
    linked.trirun_cuda_get_limits(ctypes.byref(limits))
    values = tuple(getattr(limits, name) for name, _ in Limits._fields_)
    assert values == (64, 128, 128, 64, 87296, 65536, 4, 256, 192, 87040, 64, 8, 8192, 4096)


@needs_hopper
def test_plans_that_count_in_the_workspace(linked):
    needs_zeros = linked.trirun_cuda_plan_needs_zeros
    for kernel, cta_split, quantized, expected in (
        (STREAM, 2, 1, 0),
        (STREAM_SM80, 1, 1, 0),
        (STREAM_SM80, 2, 0, 1),
        (SPANS, 0, 0, 0),
        (SPANS, 0, 1, 1),
        (PREFILL_WGMMA, 2, 0, 0),
    ):
        struct = PlanStruct(*Plan(kernel, cta_split=cta_split))
        assert needs_zeros(ctypes.byref(struct), quantized) == expected, kernel


@needs_hopper
def test_the_id_of_a_capture(linked):
    linked.described_capture.argtypes = [ctypes.c_ulonglong]
    assert linked.trirun_cuda_capture_id(None) == 0
    linked.described_capture(1 << 40)
    assert linked.trirun_cuda_capture_id(None) == 1 << 40
    linked.described_capture(0)
