"""select: how the stream kernel divides a product among warps and CTAs."""

from itertools import product

import pytest
from trirun_kernels.plan.problem import SPANS, STREAM, STREAM_SM80, Device, Plan, Problem
from trirun_kernels.plan.select import select
from trirun_kernels.plan.shared import shared_bytes
from trirun_kernels.plan.stream import Stream, stream_plans
from trirun_kernels.plan.table import table

from tests.kernels.plan.support import needs_library

pytestmark = needs_library
H200, A100 = Device(90, 132), Device(80, 108)
SMALLER = [Stream(*plan) for plan in table("stream")["smaller"]]
SIZES = (1024, 2560, 4096, 5120, 8192, 10240, 14336, 22016, 28672, 57344, 128256)


def plan_of(stream: Stream, device: Device = H200) -> Plan:
    warps, split, ctas, stages, per_sm, fused = stream
    kernel = STREAM if device.arch >= 90 else STREAM_SM80
    return Plan(kernel, 0, 0, warps, split, ctas, stages, device.sms * per_sm, int(fused))


# Fastest of up to 380 plans on an H200, or within 3 % of it.
@pytest.mark.parametrize(
    ("n", "k", "m", "group_size", "act_bits", "ready", "expected"),
    [
        (4096, 4096, 1, -1, 16, True, Stream(8, 8, 1, 6, 1)),
        (4096, 4096, 2, -1, 16, False, Stream(8, 8, 1, 6, 1)),
        (2560, 2560, 1, 128, 16, False, Stream(4, 2, 4, 4, 2, True)),
        (3584, 18944, 8, 128, 16, True, Stream(8, 4, 4, 4, 1)),
        (8192, 8192, 1, -1, 16, False, Stream(16, 16, 1, 2, 1, True)),
        (8192, 8192, 2, -1, 16, False, Stream(16, 16, 1, 2, 1)),
        (8192, 8192, 8, 128, 16, False, Stream(8, 8, 1, 2, 1)),
        (8192, 28672, 1, -1, 16, False, Stream(8, 8, 1, 6, 1)),
        (6912, 2560, 1, -1, 16, True, Stream(8, 8, 1, 4, 1)),
        (10240, 8192, 4, -1, 16, True, Stream(8, 8, 1, 2, 2)),
        (10240, 8192, 8, -1, 16, True, Stream(4, 2, 4, 3, 3)),
        (22016, 4096, 4, 128, 16, True, Stream(4, 4, 1, 3, 3)),
        (28672, 8192, 1, -1, 16, False, Stream(8, 2, 2, 6, 2, True)),
        (57344, 8192, 8, -1, 16, True, Stream(16, 1, 2, 2, 1)),
        (8192, 8192, 1, -1, 8, False, Stream(4, 4, 2, 6, 2)),
        (6912, 2560, 1, -1, 8, False, Stream(8, 4, 1, 4, 2, True)),
        (2560, 2560, 2, -1, 8, False, Stream(8, 8, 1, 6, 1, True)),
        (640, 2560, 4, -1, 8, False, Stream(8, 4, 4, 4, 2, True)),
        (2560, 6912, 8, -1, 8, False, Stream(8, 8, 2, 6, 1)),
        (22016, 4096, 2, -1, 8, True, Stream(8, 4, 1, 3, 2)),
        (4096, 11008, 16, -1, 8, False, Stream(8, 8, 2, 2, 1)),
        (2560, 2560, 16, -1, 8, True, Stream(4, 4, 2, 4, 2)),
    ],
)
def test_plans_are_the_measured_best(n, k, m, group_size, act_bits, ready, expected):
    assert select(n, k, m, group_size, act_bits, H200, quantized=ready) == plan_of(expected)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda d: str(d.arch))
def test_every_plan_is_launchable_with_and_without_limbs(device):
    seen = 0
    for n, k, m, group, bits, ready in product(
        SIZES, SIZES[:-1], (1, 2, 3, 4, 5, 8), (-1, 64, 128), (8, 16), (False, True)
    ):
        try:
            plan = select(n, k, m, group, bits, device, quantized=ready)
        except ValueError:  # x fits no CTA of an A100, and must stay limbs
            assert ready and device == A100
            continue
        if plan.kernel not in (STREAM, STREAM_SM80):
            assert m > 4 or device == A100
            continue
        seen += 1
        where = f"{n}x{k} m={m} g={group} a{bits} ready={ready}: {plan}"
        assert plan.warps in (4, 8, 16) and plan.warps % plan.warp_split == 0, where
        assert plan.warp_split * plan.cta_split <= min(32, k // 128), where
        assert plan.stages in (2, 3, 4, 6) and not (plan.fused and (ready or m > (4 if bits == 8 else 2))), where
        problem = Problem(n, k, m, group, bits, device, quantized=ready)
        assert 0 < shared_bytes(problem, plan) <= (227 if device == H200 else 163) * 1024, where
    assert seen > 2000


def test_clusters_of_four_run_at_once():
    """30 of them on 132 multiprocessors for every CTA that one holds: more would wait for a second turn."""
    seen = 0
    for n, k, m, group, ready in product(SIZES, SIZES[:-1], (1, 2, 4, 8), (-1, 128), (False, True)):
        plan = select(n, k, m, group, 16, H200, quantized=ready)
        if plan.kernel != STREAM or plan.cta_split != 4 or plan in [plan_of(last) for last in SMALLER]:
            continue
        seen += 1
        tiles = -(-n // 64 // (plan.warps // plan.warp_split))
        shared = shared_bytes(Problem(n, k, m, group, 16, H200, quantized=ready), plan)
        held = min(16 // plan.warps, 228 * 1024 // (shared + 1024))
        assert min(tiles, plan.ctas // 4) <= 30 * held, (n, k, m, group, ready, plan)
    assert seen > 50


def test_without_clusters_ctas_share_an_n_tile_only_if_x_fits_no_other_way():
    for n, k, m, bits, ready in product(SIZES, SIZES[:-1], (1, 2, 4, 8), (8, 16), (False, True)):
        plans = stream_plans(Problem(n, k, m, -1, bits, A100, quantized=ready))
        assert plans[0].cta_split == 1 and plans[-len(SMALLER) :] == SMALLER, plans
    plan = select(4096, 8192, 1, -1, 16, A100)
    assert plan.kernel == STREAM_SM80 and plan.cta_split == 1


def test_weights_of_few_n_tiles_stay_on_mma():
    assert select(3584, 18944, 8, -1, 16, H200).kernel == STREAM
    assert select(8192, 28672, 8, -1, 16, H200).kernel == SPANS
    # One limb: up to 16 rows, wider weights where x is ready.
    assert select(4096, 11008, 16, -1, 8, H200).kernel == STREAM
    assert select(8192, 8192, 16, -1, 8, H200, quantized=True).kernel == STREAM
    assert select(8192, 8192, 16, -1, 8, H200).kernel == SPANS
