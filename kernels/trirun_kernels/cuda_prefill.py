"""Which tile a Hopper prefill runs with: a pure function of the problem, from cycle counts taken on an H200."""

from __future__ import annotations

# Clusters of so many CTAs that run at once, as a share of the multiprocessors: they do not cross the borders of a GPC
# (132, 66, 39, 30, 17 and 15 of them on an H200's 132, by cudaOccupancyMaxActiveClusters).
CLUSTERS = {1: 1.0, 2: 66 / 132, 3: 39 / 132, 4: 30 / 132, 6: 17 / 132, 8: 15 / 132}
ROW_TILE = 256  # out_features of one CTA
# Clock cycles per column of k of a tile: 64 tokens do not keep the tensor cores as busy as 128.
CYCLES = {64: 8.7, 128: 16.2}
CYCLES_GROUPS = {64: 14.0, 128: 18.1}  # scales enter the fragments
CYCLES_INT8 = {64: 4.7, 128: 8.5}
LAUNCH = 4000  # cycles from launch to first product, and of the outputs of the last tile
NEXT_TILE = 1000  # cycles between tiles of 64 rows of a CTA, in which its warpgroups' sums come together
UNIT = 128  # columns of k that the CTAs sharing all tiles divide by
# Cycles of a tile of 64 rows that several CTAs share: to leave sums in the workspace and be waited for, and to add
# those of one CTA. Half as much again for 128 rows, and a quarter more for 8-bit products, by measured times.
LEAVE, ADD = 4400, 1400


def prefill_tile(
    n: int, k: int, m: int, sms: int, *, plain: bool, int8: bool, grouped: bool = False
) -> tuple[int, int, int]:
    """Rows of x of one CTA (64 or 128), the CTAs of a cluster that share a tile along k, and, where the CTAs share all
    tiles' k equally instead, their number (otherwise 0).

    Args:
        n, k: padded sizes of the stored weight. m: rows of x. sms: multiprocessors.
        plain: a zero point in quarters and no groups of 32; only such weights have a kernel for 64 rows.
        int8: 8-bit activations on integer tensor cores, twice the rate.
        grouped: scales per group of columns.
    """
    cycles = CYCLES_INT8 if int8 else CYCLES_GROUPS if grouped else CYCLES
    choices = []
    for tokens in (64, 128) if plain or int8 else (128,):
        for split in CLUSTERS:
            if split == 1 or k // (128 if int8 else 64) >= 4 * split:
                choices.append((_cycles(n, k, m, sms, tokens, split, cycles), tokens, split, 0))
        tiles = -(-n // ROW_TILE) * -(-m // tokens)
        # Many rows of x were not measured so: CTAs at different k would not share words in L2.
        if tiles < 2 * sms and m <= 256 and not (int8 and tokens == 64 and k % (2 * UNIT)):
            for ctas in {sms, tiles * (sms // tiles)}:
                if 0 < ctas <= tiles * (k // UNIT):
                    work, exchange = _shared_cycles(k, tiles, ctas, tokens, cycles)
                    choices.append((LAUNCH + work + exchange * (1.25 if int8 else 1), tokens, 1, ctas))
    return min(choices)[1:]


def _shared_cycles(k: int, tiles: int, ctas: int, tokens: int, cycles: dict[int, float]) -> tuple[float, float]:
    """Of the CTA with the most to do: its products, and what it has to do with the others' sums."""
    of_tile = k // UNIT
    units = -(-tiles * of_tile // ctas)
    work = units * UNIT * cycles[tokens]
    if tiles % ctas == 0:
        return work, 0
    # A CTA that ends one tile and begins another leaves sums of both. Of 128 rows, only where shares have nothing to do
    # with tiles: shares of a tile that are not quite equal cost less than two borders by measured times.
    borders = 1 if ctas % tiles == 0 and (tokens == 128 or of_tile % (ctas // tiles) == 0) else 2
    return work, (0.5 + tokens / 128) * (borders * LEAVE + (1 + ctas / tiles) * ADD)


def _cycles(n: int, k: int, m: int, sms: int, tokens: int, split: int, cycles: dict[int, float]) -> float:
    tiles = -(-n // ROW_TILE) * -(-m // tokens)
    per_tile = k * cycles[tokens]
    if split > 1:
        # Sums of other CTAs travel through shared memory; the more CTAs, the more of them.
        reduction = 5000 + 800 * split if tokens == 64 else 5000 + 1300 * split
        return LAUNCH + -(-tiles // int(sms * CLUSTERS[split])) * (per_tile / split + reduction)
    whole, rest = divmod(tiles, sms)
    # The kernel itself shares the tiles of a last, mostly empty round among clusters.
    last = next((s for s in (8, 6, 4, 3, 2) if whole and rest * s * (32 if s == 2 else 36) <= sms * 32), 1)
    round_of_tiles = per_tile + (NEXT_TILE if tokens == 64 else 0)
    return LAUNCH + whole * round_of_tiles + (rest > 0) * (per_tile / last + (8000 if last > 1 else 0))
