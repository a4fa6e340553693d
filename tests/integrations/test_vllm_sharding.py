"""What a rank reads of a packed layer, against slices of the dequantized weight; without vLLM."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels.weights.packing import PackedWeight, dequantize, pack, unpack
from trirun_kernels.weights.shapes import K_BLOCK, N_TILE
from trirun_kernels.weights.spec import QuantSpec

from trirun_cli.integrations.vllm_sharding import Shard, common_spec

SPECS = [QuantSpec(128, 1.0), QuantSpec(64, 1.5), QuantSpec(128, None), QuantSpec(-1, 1.0), QuantSpec(-1, None)]


def random_weight(n: int, k: int, spec: QuantSpec) -> PackedWeight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
    scales, zeros = (torch.rand(n, spec.groups(k), generator=generator).half() + 0.1 for _ in range(2))
    return pack(codes, scales, spec, zeros if spec.zero is None else None)


def read(shard: Shard, layers: list[tuple[PackedWeight, int, int]], first_column: int = 0) -> PackedWeight:
    """A rank's weight, sliced as vLLM slices: rows [first, first + count) of each stored layer, and the rank's columns.

    Args:
        layers: of each merged layer the stored weight, the first row and the number of rows.
    """
    weights, scales, zeros = [], [], []
    group = shard.k if shard.spec.group_size == -1 else shard.spec.group_size
    # A layer that is not split along k is read with its padded columns.
    columns, groups = shard.weight_shape[1], shard.groups_shape[0 if shard.tiled else 1]
    column = first_column // K_BLOCK if shard.tiled else first_column
    for w, first, count in layers:
        tiles = N_TILE if shard.tiled else 1
        weight = shard.weight(w.words).narrow(0, first // tiles, count // tiles).narrow(1, column, columns)
        weights.append(weight)
        for values, stored in ((scales, w.scales), (zeros, w.zeros)):
            if stored is not None:
                rows, deep = (1, 0) if shard.tiled else (0, 1)
                start = 0 if shard.spec.group_size == -1 else first_column // group
                values.append(shard.groups(stored).narrow(rows, first, count).narrow(deep, start, groups))
    rows = 1 if shard.tiled else 0
    return shard.packed(torch.cat(weights), torch.cat(scales, rows), torch.cat(zeros, rows) if zeros else None)


def parts(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows of a rank; of fewer than ranks heads of 64 each is on several ranks."""
    heads = total // 64
    if heads < ranks:
        return rank // (ranks // heads) * 64, 64
    return rank * total // ranks, total // ranks


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_merged_rows_of_a_rank_are_slices(spec: QuantSpec, ranks: int) -> None:
    q, k, v = (random_weight(n, 384, spec) for n in (512, 256, 256))
    for rank in range(ranks):
        layers = [(w, *parts(w.n, ranks, rank)) for w in (q, k, v)]
        shard = Shard.of([count for _, _, count in layers], 384, 384, spec)
        assert shard.tiled and not shard.splits_k
        want = torch.cat([dequantize(w)[first : first + count] for w, first, count in layers])
        assert torch.equal(dequantize(read(shard, layers)), want)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("n", [1408, 1000])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_half_tiles_go_through_codes(spec: QuantSpec, n: int, ranks: int) -> None:
    gate, up = random_weight(n, 384, spec), random_weight(n, 384, spec)
    for rank in range(ranks):
        layers = [(w, rank * n // ranks, n // ranks) for w in (gate, up)]
        shard = Shard.of([n // ranks] * 2, 384, 384, spec)
        assert shard.tiled == (n // ranks % 64 == 0)
        want = torch.cat([dequantize(w)[first : first + count] for w, first, count in layers])
        got = read(shard, layers)
        assert torch.equal(dequantize(got), want)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("k", [1408, 1024, 3072])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_columns_of_a_rank_are_slices_with_smaller_groups_where_it_cuts_one(
    spec: QuantSpec, k: int, ranks: int
) -> None:
    w, own = random_weight(128, k, spec), k // ranks
    if spec.group_size != -1 and own % 32:
        with pytest.raises(ValueError, match=f"{own} of {k} columns"):
            Shard.of([128], own, k, spec)
        return
    for rank in range(ranks):
        shard = Shard.of([128], own, k, spec)
        assert shard.splits_k and shard.tiled == (own % 32 == 0)
        got = read(shard, [(w, 0, 128)], rank * own)
        assert torch.equal(dequantize(got), dequantize(w)[:, rank * own : (rank + 1) * own])


def test_a_cut_group_keeps_its_scale_in_groups_of_64_or_32() -> None:
    assert Shard.of([64], 1408 // 2, 1408, QuantSpec(128)).spec.group_size == 64
    assert Shard.of([64], 1408 // 4, 1408, QuantSpec(128)).spec.group_size == 32
    scales = torch.arange(11 * 64).view(11, 64)
    assert torch.equal(Shard.of([64], 1408 // 4, 1408, QuantSpec(128)).groups(scales)[::4], scales)
    assert torch.equal(Shard.of([64], 1408 // 4, 1408, QuantSpec(-1)).groups(scales[:1]), scales[:1])


def test_a_common_grid_has_the_smallest_groups_and_real_zeros_where_zero_points_differ() -> None:
    assert common_spec([QuantSpec(128, 1.0)] * 3) == QuantSpec(128, 1.0)
    assert common_spec([QuantSpec(-1, 2.0), QuantSpec(128, 2.0), QuantSpec(64, 2.0)]) == QuantSpec(64, 2.0)
    assert common_spec([QuantSpec(128, 1.0), QuantSpec(128, 1.5)]) == QuantSpec(128, None)
    assert common_spec([QuantSpec(-1, None), QuantSpec(-1, 1.5)]) == QuantSpec(-1, None)


def test_what_is_read_as_stored_is_what_packing_the_slice_gives() -> None:
    for spec in SPECS:
        w = random_weight(256, 448 if spec.group_size != 128 else 384, spec)
        shard = Shard.of([256], w.k, w.k, spec)
        got = read(shard, [(w, 0, 256)])
        assert torch.equal(got.words, w.words) and torch.equal(got.scales, w.scales)
        half = Shard.of([256], 192, 384, QuantSpec(64, spec.zero))
        source = random_weight(256, 384, QuantSpec(64, spec.zero))
        codes, scales, zeros = unpack(source)
        want = pack(codes[:, 192:].contiguous(), scales[:, 3:], half.spec, None if zeros is None else zeros[:, 3:])
        got = read(half, [(source, 0, 256)], 192)
        assert torch.equal(got.words, want.words) and torch.equal(got.scales, want.scales)
