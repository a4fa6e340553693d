"""Which tile a Hopper prefill runs with: a pure function of the problem, from cycle counts taken on an H200."""

from __future__ import annotations

from typing import NamedTuple

# Clusters of so many CTAs that run at once, as a share of the multiprocessors: they do not cross the borders of a GPC
# (132, 66, 39, 30, 17 and 15 of them on an H200's 132, by cudaOccupancyMaxActiveClusters; of five, 22 were seen to).
CLUSTERS = {1: 1.0, 2: 66 / 132, 3: 39 / 132, 4: 30 / 132, 5: 22 / 132, 6: 17 / 132, 8: 15 / 132}
TALL, LOW = 256, 192  # out_features of one CTA: four strips of tile64, or three (zero points in quarters only)
# Two strips and 64 rows of x (the same): of 16 bits two CTAs fit a multiprocessor, so that those of the next kernel
# begin while these end.
HALF = 128
EARLY = 2  # stages of words asked for before x is there; all of them would be in its way
# Clock cycles per column of k of a tile. 64 tokens do not keep the tensor cores as busy as 128 (16.2 and 12.2, counted
# as what they are at the clock of 64: busier tensor cores have a lower one).
CYCLES = {(TALL, 64): 8.7, (TALL, 128): 17.0, (LOW, 64): 7.1, (LOW, 128): 12.8, (HALF, 64): 5.14}
# Scales enter the fragments: in tiles of four strips by a multiplication more, in lower ones as a factor of the codes.
CYCLES_GROUPS = {(TALL, 64): 11.0, (TALL, 128): 16.0}
CYCLES_UNITS = CYCLES_GROUPS | {(LOW, 64): 7.8, (LOW, 128): 12.9, (HALF, 64): 5.9}  # groups of 128
CYCLES_SMALL = CYCLES_GROUPS | {(LOW, 64): 10.5, (LOW, 128): 14.0, (HALF, 64): 8.0}  # of 32 and 64
CYCLES_INT8 = {(TALL, 64): 4.7, (TALL, 128): 8.5, (LOW, 64): 3.9, (LOW, 128): 6.25, (HALF, 64): 3.2}
SUMS_INT8 = {TALL: 1.3, LOW: 1.3, HALF: 1.0}  # what the exchange of sums takes, beside that of 16-bit products
# Cycles from launch to first product, and of the outputs of the last tile.
LAUNCH = {TALL: 4000, LOW: 4000, HALF: 2400}
LAST_ROUND = 125  # for each row of x: cycles of a second launch, whose clusters share the tiles of a last round
NEXT_TILE = 2000  # cycles between tiles of 64 rows of a CTA, in which its warpgroups' sums come together
# Tiles a multiprocessor, with more of which a last round is short beside the others: of tiles in AHEAD, of the rest.
MOST_SHARED, MOST_LEFT = 9, 4
UNIT = 128  # columns of k that the CTAs sharing all tiles divide by
# Cycles of a tile of 64 rows that several CTAs share: to leave sums in the workspace and be waited for, and to add
# those of one CTA. Half as much again for 128 rows, and SUMS_INT8 times that of 8-bit products, by measured times.
LEAVE, ADD = {TALL: 3600, LOW: 2800, HALF: 3000}, {TALL: 1400, LOW: 800, HALF: 1100}
# Both where shares are at least a tile long: what a CTA adds comes to its stages while it multiplies. Not for the
# largest tile, whose sums do not fit there.
AHEAD = {(TALL, 64): 10000, (LOW, 64): 6500, (LOW, 128): 6000, (HALF, 64): 5800}
# The same where two CTAs of a cluster have added up what they have before; and those cycles themselves.
PAIRS_LEAVE, PAIRS_ADD = {TALL: 1300, LOW: 800, HALF: 1200}, {TALL: 2100, LOW: 1500, HALF: 1400}
PAIR = {TALL: 2700, LOW: 2700, HALF: 3400}
# Of a cluster that shares a tile, and for each of its CTAs: sums that travel through shared memory.
CLUSTER_SUMS = {
    (TALL, 64): (5000, 800),
    (TALL, 128): (5000, 1300),
    (LOW, 64): (1200, 1150),
    (LOW, 128): (1500, 1500),
    (HALF, 64): (2800, 650),
}


class Tile(NamedTuple):
    """``tokens`` (64 or 128) by ``rows`` of w (256, 192 or 128) in one CTA. ``split``: CTAs of a cluster that share a
    tile along k. ``ctas``: of the whole launch, where they share all tiles' k equally; 0 where they do not. With both,
    all tiles have as many CTAs, which meet in clusters of two (``split``) first."""

    tokens: int
    rows: int
    split: int
    ctas: int


def prefill_tile(n: int, k: int, m: int, sms: int, *, plain: bool, int8: bool, group_size: int = -1) -> Tile:
    """The tile of the fewest cycles for y[m, n] = x[m, k] · wᵀ: see :func:`prefill_choices`."""
    return min(prefill_choices(n, k, m, sms, plain=plain, int8=int8, group_size=group_size))[1]


def prefill_choices(
    n: int, k: int, m: int, sms: int, *, plain: bool, int8: bool, group_size: int = -1
) -> list[tuple[float, Tile]]:
    """Tiles for y[m, n] = x[m, k] · wᵀ, each behind its cycles.

    Args:
        n, k: padded sizes of the stored weight. m: rows of x. sms: multiprocessors.
        plain: a zero point in quarters; only such weights have tiles of fewer strips, or for 64 rows.
        int8: 8-bit activations on integer tensor cores, twice the rate; only with one scale per output channel.
        group_size: columns of a scale, or -1.
    """
    per_group = CYCLES_UNITS if group_size == UNIT else CYCLES_SMALL
    cycles = CYCLES_INT8 if int8 else CYCLES if group_size == -1 else per_group
    choices: list[tuple[float, Tile]] = []
    scaled = group_size != -1 or not plain
    tall_tiles = -(-n // TALL) * -(-m // 128)  # where there are many, tiles of either height fill the last round
    for (rows, tokens), per_column in cycles.items():
        if (tokens == 64 and not (plain or int8)) or (rows != TALL and (not plain or tall_tiles > 12 * sms)):
            continue
        if group_size == 32 and (rows, tokens) == (TALL, 64):
            continue
        factor = SUMS_INT8[rows] if int8 else 1
        for split in CLUSTERS:
            long = k // (128 if int8 else 64) >= 4 * split
            # Its sums are four units, which others divide badly; in threes only 8-bit products gain.
            if rows == HALF and split not in ((1, 2, 3, 4, 8) if int8 else (1, 2, 4, 8)):
                continue
            if split == 1 or (long and sums_fit(tokens, rows, split, int8=int8, scaled=scaled)):
                whole = _whole_cycles(n, k, m, sms, Tile(tokens, rows, split, 0), per_column, factor)
                choices.append((whole, Tile(tokens, rows, split, 0)))
        tiles = -(-n // rows) * -(-m // tokens)
        # CTAs at different k do not share words in L2, which counts where many have the same rows of w.
        most = MOST_SHARED if (rows, tokens) in AHEAD else MOST_LEFT
        unit = 2 * UNIT if int8 and (rows, tokens) == (TALL, 64) else UNIT  # of columns: warpgroups take turns there
        if tiles > most * sms or k % unit:
            continue
        for ctas in {sms, tiles * (sms // tiles)}:
            if 0 < ctas <= tiles * (k // UNIT):
                work, exchange = _shared_cycles(k, tiles, ctas, tokens, rows, per_column)
                choices.append((LAUNCH[rows] + work + exchange * factor, Tile(tokens, rows, 1, ctas)))
        for parts in (2, 4, 6, 8):
            if tiles * parts <= sms and k % (parts * unit) == 0:
                sums = _pairs_cycles(tokens, rows, parts) * factor
                choices.append((LAUNCH[rows] + k // parts * per_column + sums, Tile(tokens, rows, 2, tiles * parts)))
    return choices


def sums_fit(tokens: int, rows: int, split: int, *, int8: bool, scaled: bool) -> bool:
    """Whether the sums that ``split`` CTAs of a cluster send each other fit where their stages were: the arithmetic of
    ``TileShape`` in csrc/cuda/gemm_prefill/arguments.cuh. scaled: scales enter the fragments (groups, real zero
    points), and take as much of a stage as groups of 32 do."""
    strips = rows // 64
    warpgroups = 2 if rows == TALL else strips
    spans = 2 if tokens == 64 and not int8 and not (scaled and rows == TALL) else 1
    columns = spans * (128 if int8 else 64)
    scales = scaled * (not int8) * (2048 if rows == TALL else 2 * rows * columns // 32)
    stage = spans * tokens * 128 + strips * columns // 32 * 512 + scales
    exchange = 1024 * tokens if rows == TALL and tokens == 64 else 0
    shared = (113 if rows == HALF and not int8 else 227) * 1024
    room = shared - 2 * rows * tokens - 8 * warpgroups * tokens - 256 - exchange
    units = tokens * rows // (8 * 128 * warpgroups)  # of sums: two registers of four for every thread
    return -(-units // split) * split * 2 * 16 * 128 * warpgroups <= min(room // stage, 12) * stage


def _pairs_cycles(tokens: int, rows: int, parts: int) -> float:
    left = PAIRS_LEAVE[rows] + PAIRS_ADD[rows] * (parts // 2) if parts > 2 else 0
    return (0.5 + tokens / 128) * (PAIR[rows] + left)


def _shared_cycles(k: int, tiles: int, ctas: int, tokens: int, rows: int, per_column: float) -> tuple[float, float]:
    """Of the CTA with the most to do: its products, and what it has to do with the others' sums."""
    of_tile = k // UNIT
    units = -(-tiles * of_tile // ctas)
    work = units * UNIT * per_column
    if tiles % ctas == 0:
        return work, 0
    if ctas <= tiles and (rows, tokens) in AHEAD:
        return work, AHEAD[rows, tokens]
    # A CTA that ends one tile and begins another leaves sums of both. Of 128 rows, only where shares have nothing to do
    # with tiles: shares of a tile that are not quite equal cost less than two borders by measured times.
    borders = 1 if ctas % tiles == 0 and (tokens == 128 or of_tile % (ctas // tiles) == 0) else 2
    return work, (0.5 + tokens / 128) * (borders * LEAVE[rows] + (1 + ctas / tiles) * ADD[rows])


def _whole_cycles(n: int, k: int, m: int, sms: int, tile: Tile, per_column: float, factor: float) -> float:
    tokens, rows, split, _ = tile
    tiles = -(-n // rows) * -(-m // tokens)
    per_tile = k * per_column
    if split > 1:
        stage, (once, each) = 128 if tokens == 64 else 64, CLUSTER_SUMS[rows, tokens]
        longest = -(-k // stage // split) * stage * per_column
        rounds = -(-tiles // int(sms * CLUSTERS[split]))
        return LAUNCH[rows] + rounds * (longest + (once + each * split) * factor)
    whole, rest = divmod(tiles, sms)
    # The kernel itself shares the tiles of a last, mostly empty round among clusters.
    last = next((s for s in sorted(CLUSTERS, reverse=True) if whole and rest <= int(sms * CLUSTERS[s])), 1)
    round_of_tiles = per_tile + (NEXT_TILE if tokens == 64 else 0)
    return LAUNCH[rows] + whole * round_of_tiles + (rest > 0) * (per_tile / last + (last > 1) * LAST_ROUND * tokens)
