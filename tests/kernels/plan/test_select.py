"""select: every plan is one the C side has an instance for, on every device and shape. test_prefill.py has
prefill's tiles."""

from itertools import product

import pytest
from trirun_kernels.plan.problem import (
    DEQUANTIZE,
    GROUPS,
    PREFILL_SM80,
    PREFILL_W2A8,
    PREFILL_WGMMA,
    SPANS,
    STREAM,
    STREAM_SM80,
    Device,
    Problem,
)
from trirun_kernels.plan.select import select
from trirun_kernels.plan.shared import shared_bytes, shared_limit
from trirun_kernels.plan.spans import SpanTile, span_choices

from tests.kernels.plan.support import needs_library

pytestmark = needs_library

H200, A100, RTX4090, B200 = Device(90, 132), Device(80, 108), Device(89, 128), Device(100, 148)


def spans_tile(n: int, k: int, m: int, group_size: int, act_bits: int) -> SpanTile:
    return min(span_choices(Problem(n, k, m, group_size, act_bits, H200)))[1]


SHAPES = [
    (64, 128),
    (64, 1024),
    (128, 256),
    (192, 14336),
    (4096, 4096),
    (13824, 2560),
    (22016, 4096),
    (8192, 28672),
    (57344, 8192),
]


@pytest.mark.parametrize("device", [H200, A100, RTX4090, B200], ids=lambda d: str(d.arch))
def test_every_plan_is_launchable(device):
    for (n, k), m, group, bits in product(SHAPES, range(1, 66), (-1, 32, 64, 128), (8, 16)):
        plan = select(n, k, m, group, bits, device)
        where = f"{n}x{k} m={m} g={group} a{bits}: {plan}"
        if plan.kernel in (STREAM, STREAM_SM80):
            assert (plan.kernel == STREAM) == (device.arch >= 90), where
            assert m * (2 if bits == 16 else 1) <= 16, where
            assert plan.warps in (4, 8, 16) and plan.warps % plan.warp_split == 0, where
            assert plan.warp_split * plan.cta_split <= min(32, k // 128), where
            assert plan.stages in (2, 3, 4, 6), where
            assert plan.fused in (0, 1) and m <= 8 * (1 + (bits == 8)), where
        elif plan.kernel in (GROUPS, SPANS):
            assert device.arch == 90 and m <= 64, where
            assert plan.kernel == GROUPS or group == -1 or (group == 128 and bits == 16), where
            assert 0 <= plan.x_first <= (plan.early or plan.stages) <= plan.stages, where
            assert plan.tile_n == 0 or (plan.kernel, plan.tile_n, plan.fused, plan.cta_split) == (SPANS, 192, 0, 0)
            if plan.cta_split:
                # Clusters of two: every tile has as many CTAs, an even number, and no CTA has two tiles.
                parts, rest = divmod(plan.ctas, -(-n // 256))
                assert plan.cta_split == 2 and rest == 0 and parts % 2 == 0 and k // 128 % parts == 0, where
            assert 1 <= plan.ctas <= 2048 and 3 <= plan.stages <= 16, where
            assert plan.kernel == SPANS or plan.stages % 2 == 0, where
            if plan.fused:
                share = -(-n // 256) * (k // 128) // plan.ctas
                assert plan.kernel == SPANS and bits == 16 and 8 <= m <= 32 and k // 128 % share == 0, where
        else:
            assert plan.kernel == (PREFILL_SM80 if device.arch != 90 else plan.kernel), where
        assert 0 <= shared_bytes(Problem(n, k, m, group, bits, device), plan) <= shared_limit(device.arch), where


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        select(4096, 1 << 20, 4, -1, 16, H200, wide=True)
    assert select(4096, 1 << 20, 4, -1, 16, H200).kernel == PREFILL_WGMMA
    assert select(4096, 1 << 20, 8, -1, 16, H200, wide=True).kernel == GROUPS


def test_a_dense_weight_is_made_only_for_callers_that_multiply_by_one():
    assert select(4096, 4096, 4096, 32, 16, H200).kernel == PREFILL_WGMMA
    assert select(4096, 4096, 4096, 32, 16, H200, dense=True).kernel == DEQUANTIZE
    assert select(4096, 4096, 4096, 128, 16, H200, dense=True, plain=False).kernel == DEQUANTIZE
    assert select(4096, 4096, 1024, 32, 16, H200, dense=True).kernel == PREFILL_WGMMA
    for group in (-1, 64, 128):
        assert select(4096, 4096, 4096, group, 16, H200, dense=True).kernel == PREFILL_WGMMA


def test_many_rows_prefill():
    assert select(4096, 4096, 65, 128, 16, H200).kernel == PREFILL_WGMMA
    assert select(4096, 4096, 65, -1, 8, H200).kernel == PREFILL_W2A8
    assert select(4096, 4096, 65, 128, 8, H200).kernel == PREFILL_WGMMA
    assert select(4096, 4096, 16, -1, 16, H200).kernel == SPANS
    assert select(4096, 4096, 32, -1, 16, H200).kernel == SPANS
    assert select(4096, 4096, 32, 128, 16, H200).kernel == select(22016, 4096, 9, 128, 16, H200).kernel == SPANS
    assert select(4096, 4096, 32, 64, 16, H200, plain=False).kernel == GROUPS
    # Groups of 128, per span beside per group: 48.5 us and 59.5, 72.3 and 85.9; beside mma.sync 8.7 and 9.4.
    assert select(57344, 8192, 16, 128, 16, H200).kernel == select(57344, 8192, 32, 128, 16, H200).kernel == SPANS
    assert select(11008, 4096, 8, 128, 16, H200).kernel == SPANS
    assert select(8192, 8192, 8, 128, 16, H200).kernel == select(4096, 11008, 8, 128, 16, H200).kernel == STREAM
    assert select(8192, 4096, 8, 128, 16, H200).kernel == STREAM  # 7.40 us, 8.05
    assert select(4096, 4096, 32, 128, 16, H200, quantized=True).kernel == GROUPS
    # Of 8 bits prefill's tiles from 33 rows on (13.3 us, spans 15.3), before that for long rows (12.2, 14.4).
    assert [select(8192, 8192, m, -1, 8, H200).kernel for m in (32, 33, 64)] == [SPANS, PREFILL_W2A8, PREFILL_W2A8]
    assert [select(4096, 11008, m, -1, 8, H200).kernel for m in (16, 17, 32)] == [STREAM, PREFILL_W2A8, PREFILL_W2A8]
    assert select(4096, 4096, 64, -1, 8, H200, quantized=True).kernel == SPANS
    # Few rows, where shares of k are unequal or short: 7.6 us by spans, 6.7, and 11.1, 8.7; elsewhere 7.4 and 7.8.
    assert select(3584, 3584, 9, -1, 16, H200).kernel == select(1536, 8960, 16, -1, 16, H200).kernel == PREFILL_WGMMA
    assert select(4096, 4096, 32, -1, 16, H200).kernel == select(1280, 8192, 32, -1, 16, H200).kernel == SPANS
    assert select(4096, 1024, 33, -1, 16, H200).kernel == select(4096, 4096, 33, -1, 16, H200).kernel == PREFILL_WGMMA
    assert select(8192, 8192, 32, -1, 16, H200).kernel == SPANS
    assert select(8192, 8192, 64, -1, 16, H200).kernel == PREFILL_WGMMA
    assert select(22016, 4096, 64, -1, 8, H200).kernel == PREFILL_W2A8
    assert select(4096, 4096, 64, 32, 16, H200, plain=False).kernel == GROUPS
    assert select(57344, 8192, 8, -1, 16, H200).kernel == SPANS
    assert select(8192, 28672, 8, -1, 16, H200).kernel == SPANS
    assert select(22016, 4096, 5, -1, 16, H200).kernel == select(5120, 13824, 8, -1, 16, H200).kernel == SPANS
    assert select(4096, 11008, 8, -1, 16, H200).kernel == select(8192, 8192, 8, -1, 16, H200).kernel == STREAM
    assert [select(8192, 8192, m, -1, 8, H200).kernel for m in (8, 9)] == [STREAM, SPANS]
    assert select(4096, 4096, 17, 128, 16, A100).kernel == PREFILL_SM80


def test_quantized_activations_stay_on_decode_kernels():
    for m in range(1, 65):
        assert select(4096, 4096, m, -1, 16, H200, quantized=True).fused == 0
    with pytest.raises(ValueError, match="65 rows"):
        select(4096, 4096, 65, -1, 16, H200, quantized=True)


def test_spans_share_a_scale_only_where_this_call_gives_x_its_scales():
    assert select(57344, 8192, 16, -1, 16, H200).kernel == SPANS
    assert select(57344, 8192, 16, -1, 16, H200, quantized=True).kernel == GROUPS
    assert select(57344, 8192, 16, -1, 16, H200, wide=True).kernel == GROUPS
    # One limb has one scale per row.
    assert select(57344, 8192, 32, -1, 8, H200, quantized=True).kernel == SPANS


def test_x_is_quantized_by_the_product_where_its_share_of_k_is_short():
    assert [select(4096, 4096, m, -1, 16, H200).fused for m in (7, 8, 9, 16, 17, 32)] == [0, 1, 1, 1, 1, 1]
    assert [select(4096, 4096, m, -1, 16, H200).ctas for m in (16, 32)] == [32, 64]  # of each of two slices
    # All words of a short share at once are in the way of x: 7.82 us, 7.57; of a long one they are not: 6.26, 7.29.
    assert [select(4096, 4096, m, -1, 16, H200).stages for m in (16, 32)] == [16, 6]
    # Groups: 8.0 and 10.1 us apart, 6.8 and 9.0.
    assert [select(4096, 4096, m, 128, 16, H200).fused for m in (7, 8, 9, 16, 32)] == [0, 1, 1, 1, 1]
    assert [select(4096, 4096, m, 128, 16, H200).ctas for m in (16, 32)] == [128, 64]
    assert not any(select(8192, 8192, m, 128, 16, H200).fused for m in range(5, 65))
    assert not any(select(4096, 4096, m, 128, 16, H200, wide=True).fused for m in range(5, 65))
    for n, k in ((8192, 8192), (22016, 4096), (57344, 8192), (8192, 28672)):
        assert not any(select(n, k, m, -1, 16, H200).fused for m in range(5, 65))
    assert not any(select(4096, 4096, m, -1, 8, H200).fused for m in range(5, 65))


def test_groups_take_limbs_where_those_are_faster():
    # Microseconds of the per-span kernel, then of prefill's best tile.
    assert select(4096, 4096, 32, 128, 16, H200).kernel == SPANS  # 8.28, 8.30
    assert select(22016, 4096, 32, 128, 16, H200).kernel == SPANS  # 19.1, 22.3
    assert select(3584, 3584, 24, 128, 16, H200).kernel == PREFILL_WGMMA  # 8.5, 7.4
    assert select(11008, 4096, 48, 128, 16, H200).kernel == PREFILL_WGMMA  # 16.6, 13.7
    assert select(57344, 8192, 64, 128, 16, H200).kernel == PREFILL_WGMMA  # 139, 109
    assert select(4096, 4096, 33, 128, 16, H200, plain=False).kernel == SPANS
    for group in (32, 64):
        assert select(4096, 4096, 8, group, 16, H200).kernel == STREAM  # 7.3, 9.5
        assert select(4096, 4096, 9, group, 16, H200).kernel == PREFILL_WGMMA  # 14.8 (per group), 9.5
        assert select(4096, 4096, 9, group, 16, H200, plain=False).kernel == GROUPS
        assert select(4096, 4096, 16, group, 8, H200).kernel == STREAM


def test_ctas_of_whole_tiles_are_pairs():
    for n, k, clusters in ((8192, 8192, 2), (4096, 4096, 2), (8192, 28672, 2), (22016, 4096, 0), (57344, 8192, 0)):
        assert select(n, k, 16, -1, 16, H200).cta_split == clusters
    assert select(4096, 4096, 8, -1, 16, H200).ctas == 64  # 5.1 us, 128 of them 5.5


@pytest.mark.parametrize(
    ("n", "k", "m", "grouped", "expected"),
    [
        # Measured on an H200: microseconds of the choice, then of equal shares or the runner-up.
        (22016, 4096, 8, False, (16, 115, 192)),  # 10.9, 11.6
        (22016, 4096, 16, False, (32, 115, 192)),  # 12.6, 12.9
        (22016, 4096, 32, False, (64, 115, 192)),  # 15.8, 16.7
        (18944, 3584, 8, False, (16, 99, 192)),  # 9.8, 10.4
        (20480, 8192, 32, False, (64, 132)),  # 24.9, 27.4
        (11008, 4096, 16, False, (32, 86)),  # 8.6, 11.2
        (11008, 4096, 32, False, (64, 86)),  # 11.0, 13.9
        (6912, 2560, 32, False, (32, 54)),  # 7.2, 8.5
        (5120, 5120, 32, False, (32, 40)),  # 9.8, 10.6
        (4096, 4096, 64, False, (32, 32)),  # 9.5, 10.8
        (8192, 8192, 16, False, (32, 128)),  # 11.0, 13.0
        (8192, 8192, 32, False, (64, 128)),  # 14.1, 14.1
        (8192, 28672, 16, False, (32, 128)),
        (57344, 8192, 32, False, (64, 132)),
        (8192, 8192, 16, True, (32, 128, 256)),  # 12.0, 13.0
        (57344, 8192, 32, True, (64, 132, 256)),  # 72.3, 86.9
        (5120, 13824, 8, True, (16, 120, 256)),  # 11.7, 12.4
        (2560, 6912, 16, True, (32, 60, 256)),  # 8.3, 9.9
        (5120, 5120, 32, True, (32, 40, 256)),  # 11.0, 11.4
        (4096, 11008, 32, True, (32, 66, 256)),  # 15.9, 17.1
        (11008, 4096, 48, True, (32, 43, 256)),  # 15.4, 17.6
        (22016, 4096, 8, True, (16, 115, 192)),  # 11.8, 12.3
        (22016, 4096, 16, True, (32, 115, 192)),  # 14.2, 15.0
        (25344, 4096, 32, True, (64, 132, 192)),  # 18.6, 21.8
        (20480, 8192, 16, True, (32, 132, 256)),  # 21.8, 24.4
    ],
)
def test_spans_are_divided_as_measured_best(n, k, m, grouped, expected):
    assert spans_tile(n, k, m, 128 if grouped else -1, 16) == (*expected, 256)[:3]


@pytest.mark.parametrize(
    ("n", "k", "m", "expected"),
    [
        (8192, 8192, 16, (16, 128)),
        (8192, 8192, 64, (32, 64)),  # 15.6, 17.1
        (4096, 4096, 32, (16, 32)),  # 8.1, 9.7 in one slice
        (4096, 4096, 64, (16, 32)),  # 9.2, 9.8
        (2560, 2560, 48, (16, 20)),  # 7.0, 7.8
        (6912, 2560, 64, (32, 54)),  # 8.8, 9.1
        (2560, 6912, 32, (16, 60)),  # 9.6, 10.1
        (11008, 4096, 48, (16, 43)),  # 11.5, 13.0
        (4096, 11008, 32, (16, 66)),  # 14.7, 16.0
        (5120, 5120, 32, (16, 40)),  # 9.6, 10.3
        (22016, 4096, 32, (32, 86)),
        (57344, 8192, 16, (16, 132)),
    ],
)
def test_spans_of_one_limb_take_narrow_slices_of_small_weights(n, k, m, expected):
    assert spans_tile(n, k, m, -1, 8) == (*expected, 256)


def test_float32_rows_stay_on_decode_kernels():
    assert select(4096, 4096, 64, -1, 16, H200, wide=True).kernel == GROUPS
    assert select(4096, 4096, 8, -1, 16, A100, wide=True).kernel == STREAM_SM80


def test_old_devices_are_refused():
    with pytest.raises(ValueError, match=r"8\.0"):
        select(4096, 4096, 1, -1, 16, Device(75, 40))
