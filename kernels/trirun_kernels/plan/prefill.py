"""The Hopper prefill kernels: which tile, by counted cycles.

``tables/prefill.json`` has the cycles, measured on an H200, and explains their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from ..native import limits
from .problem import PREFILL_SM80, PREFILL_W2A8, PREFILL_WGMMA, Device, Plan, Problem
from .shared import shared_bytes
from .table import table

TALL, LOW, HALF = 256, 192, 128  # out_features of a tile: four n tiles, three or two


class Tile(NamedTuple):
    """``tokens`` (64 or 128) by ``rows`` of w (256, 192 or 128) in one CTA. ``split``: CTAs of a cluster that share a
    tile along k. ``ctas``: of the whole launch, where they share all tiles' k equally; 0 where they do not. With both,
    all tiles have as many CTAs, which meet in clusters of two (``split``) first."""

    tokens: int
    rows: int
    split: int
    ctas: int


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """The numbers of tables/prefill.json: by (rows, tokens) of a tile, by rows, or for all."""

    k_column: dict[str, dict[tuple[int, int], float]]
    int8_sums: dict[int, float]
    launch: dict[int, float]
    last_round: float
    next_tile: float
    leave: dict[int, float]
    add: dict[int, float]
    ahead: dict[tuple[int, int], float]
    pair: dict[int, float]
    pair_leave: dict[int, float]
    pair_add: dict[int, float]
    cluster: dict[tuple[int, int], tuple[float, float]]


@cache
def prefill_costs() -> PrefillCosts:
    """The costs as checked in."""
    return PrefillCosts(**table("prefill")["cycles"])


def choose_prefill(p: Problem) -> Plan:
    """The plan of the tile of the fewest cycles; mma.sync's only tile where there is no wgmma."""
    if p.device.arch != 90:
        return Plan(PREFILL_SM80, tile_m=128)
    return prefill_plan(p, min(prefill_choices(p))[1])


def prefill_plan(p: Problem, tile: Tile) -> Plan:
    """The plan of a tile."""
    kernel = PREFILL_W2A8 if has_int8_tiles(p) else PREFILL_WGMMA
    early = table("prefill")["early"]
    return Plan(kernel, tile_m=tile.tokens, tile_n=tile.rows, cta_split=tile.split, ctas=tile.ctas, early=early)


def has_int8_tiles(p: Problem) -> bool:
    """Of 8-bit activations: one scale per channel, two turns of 128 columns at least, sums that int32 holds."""
    return p.act_bits == 8 and not p.grouped and 256 <= p.k <= limits().w2a8_max_k


def prefill_choices(p: Problem, costs: PrefillCosts | None = None) -> list[tuple[float, Tile]]:
    """Every tile that can pay for a problem, behind its cycles. Only a plain zero point (``p.plain``) has low tiles,
    or 16-bit ones of 64 rows."""
    costs, most = costs or prefill_costs(), table("prefill")["most_tiles"]
    int8, sms = has_int8_tiles(p), p.device.sms
    tall_tiles = _tiles(p, TALL, 128)  # where there are many, tiles of either height fill the last round
    choices: list[tuple[float, Tile]] = []
    for (rows, tokens), per_column in costs.k_column[_kind(p, int8)].items():
        if tokens == 64 and not (p.plain or int8):
            continue
        if rows != TALL and (not p.plain or tall_tiles > most["tall"] * sms):
            continue
        if p.group_size == 32 and (rows, tokens) == (TALL, 64):
            continue
        factor, launch = costs.int8_sums[rows] if int8 else 1, costs.launch[rows]
        for split in _splits(p, rows, tokens, int8):
            tile = Tile(tokens, rows, split, 0)
            choices.append((_whole_cycles(p, tile, per_column, factor, costs), tile))
        tiles = _tiles(p, rows, tokens)
        # CTAs at different k do not share words in L2, which counts where many have the same rows of w.
        if tiles > most["ahead" if (rows, tokens) in costs.ahead else "others"] * sms:
            continue
        # CTAs divide k by so many columns: int8 tiles of both extremes have warpgroups that take turns.
        unit = limits().k_tile * (2 if int8 and (rows, tokens) == (TALL, 64) else 1)
        if p.k % unit:
            continue
        for ctas in {sms, tiles * (sms // tiles)}:
            if 0 < ctas <= tiles * p.k_tiles:
                work, exchange = _shared_cycles(p, tiles, ctas, (rows, tokens), per_column, costs)
                choices.append((launch + work + exchange * factor, Tile(tokens, rows, 1, ctas)))
        for parts in (2, 4, 6, 8):
            if tiles * parts <= sms and p.k % (parts * unit) == 0:
                sums = _pairs_cycles(tokens, rows, parts, costs) * factor
                choices.append((launch + p.k // parts * per_column + sums, Tile(tokens, rows, 2, tiles * parts)))
    return choices


def _kind(p: Problem, int8: bool) -> str:
    if int8 or not p.grouped:
        return "int8" if int8 else "channel"
    return "group_128" if p.group_size == limits().k_tile else "small_groups"


def _tiles(p: Problem, rows: int, tokens: int) -> int:
    return -(-p.n // rows) * -(-p.m // tokens)


def _splits(p: Problem, rows: int, tokens: int, int8: bool) -> Iterator[int]:
    """Sizes of clusters that can share a tile: one CTA, or as many as have four stages each and room for their sums."""
    for split in table("device")["clusters"]:
        # The sums of the smallest tile are four pieces, which others divide badly; in threes only int8 products gain.
        if rows == HALF and split not in ((1, 2, 3, 4, 8) if int8 else (1, 2, 4, 8)):
            continue
        long = p.k // (128 if int8 else 64) >= 4 * split
        if split == 1 or (long and _sums_fit(tokens, rows, split, p.group_size, p.plain, int8, p.device)):
            yield split


@lru_cache(maxsize=1 << 10)
def _sums_fit(tokens: int, rows: int, split: int, group_size: int, plain: bool, int8: bool, device: Device) -> bool:
    """Whether the sums that CTAs of a cluster send each other fit where their stages were; n, k and m do not matter."""
    p = Problem(rows, 4096, tokens, group_size, 8 if int8 else 16, device, plain=plain)
    return shared_bytes(p, prefill_plan(p, Tile(tokens, rows, split, 0))) >= 0


def _pairs_cycles(tokens: int, rows: int, parts: int, c: PrefillCosts) -> float:
    left = c.pair_leave[rows] + c.pair_add[rows] * (parts // 2) if parts > 2 else 0
    return (0.5 + tokens / 128) * (c.pair[rows] + left)


def _shared_cycles(
    p: Problem, tiles: int, ctas: int, size: tuple[int, int], per_column: float, c: PrefillCosts
) -> tuple[float, float]:
    """Of the CTA with the most to do: its products, and what it has to do with the others' sums."""
    (rows, tokens), of_tile = size, p.k_tiles
    units = -(-tiles * of_tile // ctas)
    work = units * limits().k_tile * per_column
    if tiles % ctas == 0:
        return work, 0
    if ctas <= tiles and size in c.ahead:
        return work, c.ahead[size]
    # A CTA that ends one tile and begins another leaves sums of both. Of 128 rows, only where shares have nothing to do
    # with tiles: shares of a tile that are not quite equal cost less than two borders by measured times.
    borders = 1 if ctas % tiles == 0 and (tokens == 128 or of_tile % (ctas // tiles) == 0) else 2
    return work, (0.5 + tokens / 128) * (borders * c.leave[rows] + (1 + ctas / tiles) * c.add[rows])


def _whole_cycles(p: Problem, tile: Tile, per_column: float, factor: float, c: PrefillCosts) -> float:
    tokens, rows, split, _ = tile
    tiles, per_tile, clusters = _tiles(p, rows, tokens), p.k * per_column, p.device.clusters
    if split > 1:
        stage, (once, each) = 128 if tokens == 64 else 64, c.cluster[rows, tokens]
        longest = -(-p.k // stage // split) * stage * per_column
        rounds = -(-tiles // clusters(split))
        return c.launch[rows] + rounds * (longest + (once + each * split) * factor)
    whole, rest = divmod(tiles, p.device.sms)
    # The kernel itself shares the tiles of a last, mostly empty round among clusters.
    last = next((s for s in sorted(table("device")["clusters"], reverse=True) if whole and rest <= clusters(s)), 1)
    round_of_tiles = per_tile + (c.next_tile if tokens == 64 else 0)
    return c.launch[rows] + whole * round_of_tiles + (rest > 0) * (per_tile / last + (last > 1) * c.last_round * tokens)
