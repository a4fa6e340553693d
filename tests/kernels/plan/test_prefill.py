"""Prefill's tiles: those the C side has instances for, and the measured best. test_select.py has the other kernels."""

from itertools import product

import pytest
from trirun_kernels.plan.prefill import HALF, LOW, TALL, Tile, prefill_choices, prefill_plan
from trirun_kernels.plan.problem import Device, Problem
from trirun_kernels.plan.select import select
from trirun_kernels.plan.shared import shared_bytes

from tests.kernels.plan.support import needs_library

pytestmark = needs_library
H200 = Device(90, 132)
CLUSTERS = (1, 2, 3, 4, 5, 6, 8)


def prefill_tile(n, k, m, *, plain=True, int8=False, group_size=-1) -> Tile:
    return min(prefill_choices(Problem(n, k, m, group_size, 8 if int8 else 16, H200, plain=plain)))[1]


def test_tiles_have_instances():
    shapes = product((64, 320, 4096, 22016, 57344), (128, 512, 4096, 28672), (17, 65, 129, 256, 1000, 16384))
    for (n, k, m), plain, int8, grouped in product(shapes, *(((True, False),) * 3)):
        tile = prefill_tile(n, k, m, plain=plain, int8=int8, group_size=128 if grouped and not int8 else -1)
        assert tile.tokens == 128 or (tile.tokens == 64 and (plain or int8))
        assert tile.rows == TALL or plain
        assert tile.rows in (TALL, LOW) or (tile.rows, tile.tokens) == (HALF, 64)
        assert tile.split in CLUSTERS and tile.ctas <= H200.sms and (tile.ctas == 0 or tile.split <= 2)
        # Every CTA of a cluster has work, and both warpgroups of a 64-token tile.
        assert tile.split == 1 or k // (128 if int8 else 64) >= 2 * tile.split
        if tile.ctas and tile.split == 2:
            # Clusters of two: every tile has as many CTAs, an even number, that divide its stages.
            parts, rest = divmod(tile.ctas, -(-n // tile.rows) * -(-m // tile.tokens))
            turns = 256 if int8 and (tile.rows, tile.tokens) == (TALL, 64) else 128
            assert rest == 0 and parts % 2 == 0 and k % (parts * turns) == 0


@pytest.mark.parametrize(
    ("n", "k", "m", "int8", "expected"),
    [
        # Measured on an H200: microseconds of the choice, then of the best of another kind.
        (8192, 8192, 64, False, (64, HALF, 2, 128)),  # 15.8, 17.5
        (8192, 8192, 128, False, (64, TALL, 2, 128)),  # 25.9, 26.0
        (8192, 8192, 192, False, (64, LOW, 1, 0)),  # 37.3, 40.1
        (8192, 8192, 256, False, (64, TALL, 1, 0)),  # 45.7, 47.0
        (4096, 4096, 64, False, (64, HALF, 2, 128)),  # 7.9, 9.0
        (4096, 4096, 128, False, (64, HALF, 2, 128)),  # 9.2, 12.0
        (4096, 4096, 192, False, (64, LOW, 2, 132)),  # 12.9, 14.9
        (5120, 5120, 64, False, (64, LOW, 4, 0)),  # 10.2, 12.4
        (4096, 4096, 256, False, (64, HALF, 1, 0)),  # 15.1, 16.0
        (3584, 3584, 64, False, (64, HALF, 4, 0)),  # 6.7, 8.4
        (1024, 4096, 64, False, (64, HALF, 8, 0)),  # 6.2, 7.9 (spans)
        (4096, 11008, 64, False, (64, LOW, 5, 0)),  # 15.1, 15.4
        (4096, 14336, 64, False, (64, HALF, 2, 128)),  # 15.5, 17.8
        (14336, 4096, 64, False, (64, HALF, 1, 0)),  # 14.8, 15.5
        (11008, 4096, 64, False, (64, LOW, 2, 116)),  # 12.8, 15.1
        (11008, 4096, 128, False, (64, LOW, 1, 0)),  # 20.0, 23.8
        (11008, 4096, 256, False, (128, LOW, 1, 0)),  # 34.1, 38.3
        (22016, 4096, 64, False, (64, LOW, 1, 0)),  # 20.0, 23.6
        (22016, 4096, 128, False, (128, LOW, 1, 0)),  # 34.0, 38.4
        (22016, 4096, 256, False, (128, LOW, 1, 132)),  # 66.5, 68.4
        (27648, 5120, 128, False, (128, LOW, 1, 132)),  # 50.2, 53.9
        (8192, 28672, 64, False, (64, TALL, 2, 128)),  # 45.0, 45.7
        (8192, 28672, 128, False, (64, TALL, 2, 128)),  # 78.6, 78.4
        (57344, 8192, 64, False, (64, TALL, 1, 132)),  # 87.6, 94.6
        (57344, 8192, 128, False, (128, LOW, 1, 132)),  # 159.8, 160.7
        (57344, 8192, 256, False, (128, LOW, 1, 132)),  # 305.9, 312.9
        (28672, 4096, 128, False, (128, LOW, 1, 132)),  # 43.8, 45.7
        (18944, 3584, 256, False, (128, LOW, 1, 132)),  # 46.8, 51.5
        (13824, 5120, 512, False, (128, LOW, 1, 132)),  # 97.1, 102.7
        (28672, 8192, 512, False, (128, LOW, 1, 132)),  # 315, 326
        (22016, 4096, 1024, False, (128, LOW, 1, 0)),  # 242, 257
        (8192, 8192, 4096, False, (128, TALL, 1, 0)),
        # Of 8-bit activations from 33 rows on, where the other kind is the per-span kernel.
        (8192, 8192, 64, True, (64, HALF, 2, 128)),  # 13.3, 15.3 (spans)
        (8192, 8192, 128, True, (64, TALL, 2, 128)),  # 19.2, 20.1
        (8192, 8192, 256, True, (64, TALL, 1, 0)),  # 28.3, 31.5
        (4096, 4096, 64, True, (64, HALF, 3, 0)),  # 8.2, 8.7 (spans)
        (4096, 4096, 128, True, (64, HALF, 2, 128)),  # 9.7, 10.6
        (4096, 11008, 64, True, (64, HALF, 3, 0)),  # 12.8, 15.6 (spans)
        (2560, 2560, 64, True, (64, HALF, 4, 0)),  # 6.7, 7.1 (spans)
        (6912, 2560, 128, True, (64, HALF, 1, 0)),  # 9.2, 10.5
        (13824, 5120, 64, True, (64, HALF, 1, 0)),  # 13.8, 15.9 (spans)
        (8192, 28672, 64, True, (64, TALL, 2, 128)),  # 33.1, 33.3
        (8192, 28672, 128, True, (64, TALL, 2, 128)),  # 48.3, 49.1
        (11008, 4096, 128, True, (64, LOW, 1, 0)),  # 15.9, 18.2
        (57344, 8192, 128, True, (128, LOW, 1, 132)),  # 85.5, 87.0
        (22016, 4096, 64, True, (64, LOW, 1, 0)),  # 16.2, 17.1
        (22016, 4096, 128, True, (128, LOW, 1, 0)),  # 23.0, 25.5
        (22016, 4096, 256, True, (128, LOW, 1, 0)),  # 40.0, 42.7
        (57344, 8192, 64, True, (64, TALL, 1, 132)),  # 53.1, 57.6
    ],
)
def test_tile_is_the_measured_best(n, k, m, int8, expected):
    assert prefill_tile(n, k, m, plain=True, int8=int8) == expected


def sums_fit(tokens, rows, split, *, int8, group=-1):
    p = Problem(4096, 4096, tokens, group, 8 if int8 else 16, H200)
    return shared_bytes(p, prefill_plan(p, Tile(tokens, rows, split, 0))) >= 0


def test_sums_of_a_cluster_fit_its_shared_memory():
    # The kernels refuse plans whose sums do not: five CTAs of the largest tile, where stages of scales leave less.
    for split in (1, 2, 4, 8):
        assert sums_fit(64, HALF, split, int8=False)
    for tokens, rows, split, int8 in product((64, 128), (TALL, LOW), CLUSTERS, (True, False)):
        for group in (-1, 128) if rows == TALL and not int8 else (-1,):
            refused = (tokens, rows, split) == (128, TALL, 5) and (int8 or group != -1)
            assert sums_fit(tokens, rows, split, int8=int8, group=group) is not refused
    for k, m, plain in product((2560, 4096, 14336), (65, 128, 300), (True, False)):
        for n, group in product(range(64, 8192, 320), (-1, 64, 128)):
            plan = select(n, k, m, group, 16, H200, plain=plain)
            assert shared_bytes(Problem(n, k, m, group, 16, H200, plain=plain), plan) > 0, (n, k, m, plan)


@pytest.mark.parametrize(
    ("n", "k", "m", "expected"),
    [
        # Groups of 128, measured on an H200: microseconds of the choice, then of the best tile of four n tiles.
        (4096, 4096, 64, (64, HALF, 2, 128)),  # 8.5, 12.6 (spans: 11.0)
        (4096, 4096, 128, (64, HALF, 2, 128)),  # 10.1, 14.2
        (4096, 4096, 256, (64, HALF, 1, 0)),  # 15.9, 18.4
        (8192, 8192, 64, (64, HALF, 2, 128)),  # 17.3, 21.9
        (8192, 8192, 192, (64, LOW, 1, 0)),  # 45.0, 49.5
        (3584, 3584, 128, (64, HALF, 2, 112)),  # 9.2, 13.1
        (1024, 4096, 64, (64, HALF, 8, 0)),  # 6.3, 10.2
        (11008, 4096, 64, (64, LOW, 2, 116)),  # 13.8, 19.0 (spans)
        (11008, 4096, 128, (128, LOW, 2, 116)),  # 21.0, 27.3
        (22016, 4096, 64, (64, LOW, 1, 0)),  # 23.1, 29.3
        (22016, 4096, 128, (128, LOW, 1, 0)),  # 36.2, 42.9
        (28672, 8192, 128, (128, LOW, 1, 132)),  # 92, 94
        (57344, 8192, 64, (64, LOW, 1, 132)),  # 109, 118
        (8192, 8192, 128, (128, TALL, 2, 128)),  # 29.7; of lower tiles 30.8
        (57344, 8192, 128, (128, TALL, 1, 132)),  # 167; 170
    ],
)
def test_tile_of_groups_is_the_measured_best(n, k, m, expected):
    assert prefill_tile(n, k, m, group_size=128) == expected


@pytest.mark.parametrize(
    ("n", "k", "m", "group", "expected"),
    [
        # Microseconds of the choice, then of the best of another kind (per group: on limbs).
        (4096, 4096, 16, 64, (64, HALF, 2, 128)),  # 9.6, 12.5 (per group: 14.9)
        (8192, 8192, 64, 64, (64, TALL, 2, 128)),  # 21.5, 21.8
        (8192, 8192, 128, 64, (128, TALL, 2, 128)),  # 29.6, 34.7
        (11008, 4096, 32, 64, (64, LOW, 2, 116)),  # 17.8, 19.0
        (22016, 4096, 64, 64, (64, TALL, 1, 132)),  # 29.1, 30.8
        (22016, 4096, 128, 64, (128, LOW, 1, 0)),  # 39.9, 41.8
        (57344, 8192, 16, 64, (64, TALL, 1, 132)),  # 106, 133 (per group: 141)
        (4096, 4096, 64, 32, (64, HALF, 2, 128)),  # 10.0, 12.0
        (8192, 8192, 16, 32, (64, HALF, 2, 128)),  # 22.1, 27.3 (per group: 26.8)
        (22016, 4096, 32, 32, (64, LOW, 1, 0)),  # 32.2, 36.3
    ],
)
def test_tile_of_small_groups_is_the_measured_best(n, k, m, group, expected):
    assert prefill_tile(n, k, m, group_size=group) == expected


def test_small_products_share_a_tile_only_when_clusters_fit():
    for n, m in product((1024, 4096, 8192, 16384), (65, 128, 256, 512)):
        tile = prefill_tile(n, 4096, m)
        tiles = -(-n // tile.rows) * -(-m // tile.tokens)
        assert tile.ctas or tile.split == 1 or tiles <= H200.clusters(tile.split)
