"""How the kernel of runs divides a product among its CTAs: a pure function of the problem, from cycles on an H200."""

from __future__ import annotations

from typing import NamedTuple

UNIT = 128  # k of one pipeline stage, K_PAD of the layout
TILE = 256  # out_features of one CTA of the kernels of columns and runs
LOW_TILE = 192  # and of runs, where those fill the multiprocessors better
RUN = 4  # units that share a scale of x
SMALL = 1 << 24  # weights


class Cycles(NamedTuple):
    """Of a stage, by columns of digits, words coming from memory to all multiprocessors; of a tile of 192 rows (none:
    there is no kernel for it). Of a tile's sums: of two CTAs, a cluster; of more, in the workspace, once and for each
    CTA; where shares cross the tiles' borders and a CTA has sums of two, by columns and for each CTA of a tile."""

    stage: dict[int, int]
    low: dict[int, int]
    pair: int
    parts: tuple[int, int]
    crossing: tuple[dict[int, int], int]
    wide: float = 1  # times the sums of tiles with 64 columns


CHANNELS = Cycles(
    stage={16: 525, 32: 540, 64: 718},
    low={16: 483, 32: 520, 64: 666},
    pair=1500,
    parts=(5000, 100),
    crossing=({16: 9300, 32: 9300, 64: 11000}, 0),
)
GROUPS = CHANNELS._replace(  # a scale per 128 k
    stage={16: 590, 32: 660, 64: 1050},
    low={16: 550, 32: 610, 64: 950},
    crossing=({16: 8300, 32: 8300, 64: 11000}, 0),
    wide=1.5,
)
# One digit: int32 sums over all k. Slices of 16 rows are worth it for small weights, whose sums then meet in pairs.
ONE_DIGIT = Cycles(
    stage={16: 410, 32: 490}, low={}, pair=1800, parts=(3500, 420), crossing=({16: 5000, 32: 5000}, 1200)
)
ODD_CYCLES = 1500  # of an odd number of CTAs, more than two


def runs_tile(
    n: int, k: int, m: int, digits: int, sms: int, longest: int, *, grouped: bool = False
) -> tuple[float, int, int, int]:
    """Cycles of products and sums; columns of digits of a slice of x (16, 32 or 64), the CTAs of a slice, and the
    out_features of a tile.

    Either every tile of 256 out_features has as many CTAs, which divide its k, or the k of all tiles is one line cut
    into equal shares; or every tile of 192 has one. Slices of fewer rows of x leave multiprocessors for fewer CTAs a
    tile.

    Args:
        n, k: padded sizes of the stored weight. m: rows of x, ``digits`` (1 or 2) columns each.
        sms: multiprocessors. longest: units of 128 k that a CTA may add up of a tile. grouped: scales per 128 k.
    """
    cycles = ONE_DIGIT if digits == 1 else GROUPS if grouped else CHANNELS
    tiles, units, choices = -(-n // TILE), k // UNIT, []
    for width, stage in cycles.stage.items():
        slices, wide = -(-m * digits // width), cycles.wide if width == 64 else 1
        if (width == 16 and digits == 2 and slices > 1) or (width > 16 and 2 * m * digits <= width):
            continue
        for parts in range(1, 9):
            if tiles * parts * slices <= sms and units % parts == 0 and units // parts <= longest:
                once, each = cycles.parts
                sums = cycles.pair * (parts - 1) if parts <= 2 else once + each * parts + parts % 2 * ODD_CYCLES
                choices.append((units // parts * stage + sums * wide, width, tiles * parts, TILE))
        ctas = min(max(sms // slices, 1), tiles * units)
        share = -(-tiles * units // ctas)
        if min(share, units) <= longest:
            crossing, each = cycles.crossing
            choices.append((share * stage + crossing[width] + each * ctas / tiles, width, ctas, TILE))
        low = -(-n // LOW_TILE)
        if width in cycles.low and low * slices <= sms and units <= longest:
            choices.append((units * cycles.low[width], width, low, LOW_TILE))
    if not choices:  # k so long that a CTA cannot add up one digit of it
        return float(k), 32, -(-tiles * k // (longest * UNIT)), TILE
    return min(choices)


def whole_parts(n: int, k: int, ctas: int) -> int:
    """CTAs of every tile, if all have equally many and no CTA more than one tile; else 0."""
    share, rest = divmod(-(-n // TILE) * (k // UNIT), ctas)
    return k // UNIT // share if rest == 0 and k // UNIT % share == 0 else 0


def cluster_of(n: int, k: int, ctas: int) -> int:
    """2 where the CTAs of each tile are clusters of two, whose sums meet without the workspace."""
    parts = whole_parts(n, k, ctas)
    return 2 if parts and parts % 2 == 0 else 0


def equal_shares(n: int, k: int, sms: int, least: int) -> int:
    """CTAs: as many to every tile, each with ``least`` units or more, or equal shares that cross the tiles' borders."""
    tiles, units = -(-n // TILE), k // UNIT
    whole = max(1, min(sms // tiles, units // least))
    if tiles <= sms and (10 * tiles * whole >= 9 * sms or units // (whole + 1) < least):
        return tiles * whole
    return min(sms, tiles * units)


def fused_tile(n: int, k: int, m: int, sms: int, *, grouped: bool = False) -> tuple[int, int] | None:
    """As :func:`runs_tile` where each CTA quantizes its columns of x itself: whole runs of k. None where a kernel that
    quantizes apart is as fast: outside 8 to 32 rows, for long shares of k, and those that cut runs."""
    if not 8 <= m <= 32:
        return None
    tiles, units = -(-n // TILE), k // UNIT

    def shares(slices: int, longest: int) -> list[int]:
        most = min(8, sms // (slices * tiles))
        return [p for p in range(1, most + 1) if units % (RUN * p) == 0 and units // p <= longest]

    if grouped:
        # Sums become floats every 128 k: the shortest shares. With eight rows, wide weights have mma.sync.
        if m == 8 and n * k >= 2 * SMALL:
            return None
        width, parts = (16 if m == 8 else 32), max(shares(1 if m <= 16 else 2, 8), default=0)
    elif m > 8 and n * k <= SMALL:
        # Two slices, fewer rows for each CTA to quantize; and of CTAs that share a tile few, an even number at best.
        width, longest = (16, 16) if m <= 16 else (32, 12)
        parts = min(shares(2, longest), key=lambda p: (p % 2, p), default=0)
    else:
        # Eight rows are quantized so soon that fewer CTAs' sums are worth longer shares.
        width = max(16, 1 << (2 * m - 1).bit_length())
        parts = whole_parts(n, k, equal_shares(n, k, sms, least=RUN if m > 8 else 2 * RUN))
        if parts == 0 and m <= 16:
            parts = max(shares(1, units), default=0)
    if parts == 0 or units // parts % RUN or units // parts > (8 if 2 * m <= width else 16):
        return None
    return width, tiles * parts
