"""The per-span kernel (wgmma on int8 limbs, one scale of x per 512 k): how CTAs divide a product, by counted cycles.

``tables/spans.json`` has the cycles, measured on an H200, and explains its words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from ..native import limits
from .problem import SPANS, Plan, Problem
from .shared import most_stages
from .table import Facts, first, table


class SpanTile(NamedTuple):
    """``width`` tensor-core columns (16, 32 or 64) of a slice of x, CTAs of a slice, ``rows`` of w of a CTA."""

    width: int
    ctas: int
    rows: int


@dataclass(frozen=True, slots=True)
class SpanCosts:
    """``cycles`` of tables/spans.json for one kind of problem; widths are keys."""

    k_tile: dict[int, float]
    low_k_tile: dict[int, float]
    pair: float
    parts: tuple[float, float]
    crossing: dict[int, float]
    crossing_each: float
    wide_sums: float
    odd: float


@cache
def span_costs(kind: str) -> SpanCosts:
    """The costs of a :func:`kind`, as checked in."""
    cycles = table("spans")["cycles"]
    return SpanCosts(**cycles[kind], odd=cycles["odd"])


def kind(p: Problem) -> str:
    """Which costs a problem has: "channel", "group_128" or "act8"."""
    return "act8" if p.limbs == 1 else "group_128" if p.grouped else "channel"


def choose_spans(p: Problem, *, fuses: bool) -> Plan:
    """The plan of the fewest cycles; where each CTA quantizes its columns of x itself if x can be read that way
    (``fuses``) and that is faster."""
    fused = choose_fused_spans(p) if fuses else None
    return spans_plan(p, min(span_choices(p))[1]) if fused is None else fused


def span_choices(p: Problem, costs: SpanCosts | None = None) -> list[tuple[float, SpanTile]]:
    """Every tile that the kernel has for a problem behind its cycles of products and sums.

    Either every tile of 256 out_features has as many CTAs, which divide its k, or the k of all tiles is one line cut
    into equal shares; or every tile of 192 has one. Slices of fewer rows of x leave multiprocessors for fewer CTAs a
    tile.
    """
    costs, sms, high, low_rows = costs or span_costs(kind(p)), p.device.sms, limits().tile_rows, limits().low_tile_rows
    # int32 holds a sum of one limb over so many k; with two limbs sums become floats at the end of every span.
    longest = p.k_tiles if p.limbs == 2 else limits().exact_sum_k // limits().k_tile
    tiles, units, choices = -(-p.n // high), p.k_tiles, []
    for width, stage in costs.k_tile.items():
        slices, wide = -(-p.m * p.limbs // width), costs.wide_sums if width == 64 else 1
        if (width == 16 and p.limbs == 2 and slices > 1) or (width > 16 and 2 * p.m * p.limbs <= width):
            continue
        for parts in range(1, 9):
            if tiles * parts * slices <= sms and units % parts == 0 and units // parts <= longest:
                once, each = costs.parts
                sums = costs.pair * (parts - 1) if parts <= 2 else once + each * parts + parts % 2 * costs.odd
                choices.append((units // parts * stage + sums * wide, SpanTile(width, tiles * parts, high)))
        ctas = min(max(sms // slices, 1), tiles * units)
        share = -(-tiles * units // ctas)
        if min(share, units) <= longest:
            crossing = costs.crossing[width] + costs.crossing_each * ctas / tiles
            choices.append((share * stage + crossing, SpanTile(width, ctas, high)))
        low = -(-p.n // low_rows)
        if width in costs.low_k_tile and low * slices <= sms and units <= longest:
            choices.append((units * costs.low_k_tile[width], SpanTile(width, low, low_rows)))
    if not choices:  # k so long that a CTA cannot add up one limb of it
        k_tile = limits().k_tile
        return [(float(p.k), SpanTile(32, -(-tiles * p.k // (longest * k_tile)), high))]
    return choices


def spans_plan(p: Problem, tile: SpanTile) -> Plan:
    """The plan of a tile: as many stages as fit and pay, and which of them are asked for before x is there."""
    rules, whole = table("spans"), tile.rows == limits().tile_rows
    parts = whole_parts(p, tile.ctas) if whole else 1
    known: dict[str, float | str] = {
        "limbs": p.limbs,
        "scale": p.scale,
        "width": tile.width,
        "tile": tile.rows,
        "k": p.k,
    }
    known["share"] = p.k_tiles // parts if parts else inf
    early = first(rules["early"], known)
    plan = Plan(
        SPANS,
        tile_m=tile.width,
        tile_n=0 if whole else tile.rows,
        cta_split=_cluster(parts) if whole else 0,
        ctas=tile.ctas,
        early=early,
        x_first=early,
    )
    return most_stages(p, plan, first(rules["stages"], known), beside=rules["beside"])


def choose_fused_spans(p: Problem) -> Plan | None:
    """The plan where each CTA quantizes its columns of x itself, whole spans of k; None where a kernel that quantizes
    apart is as fast."""
    rules, span = table("spans"), limits().span_k_tiles
    known: Facts = {"m": p.m, "scale": p.scale, "weights": p.weights}
    layout = first(rules["fused"], known)
    if layout is None:
        return None
    tiles, units = -(-p.n // limits().tile_rows), p.k_tiles
    most = min(8, p.device.sms // (layout["slices"] * tiles))
    fitting = [q for q in range(1, most + 1) if units % (span * q) == 0 and units // q <= layout["longest"]]
    parts = 0
    if "equal" in layout["parts"]:
        parts = whole_parts(p, equal_shares(p, least=layout["least"]))
    if "most" in layout["parts"] and parts == 0:
        parts = max(fitting, default=0)
    if layout["parts"] == "fewest, even":
        parts = min(fitting, key=lambda q: (q % 2, q), default=0)
    share = units // parts if parts else 0
    if share == 0 or share % span or share > layout["longest"]:
        return None
    stages = first(rules["fused_stages"], {"share": share, "width": layout["width"], "scale": p.scale})
    plan = Plan(SPANS, tile_m=layout["width"], cta_split=_cluster(parts), ctas=tiles * parts, fused=1)
    return most_stages(p, plan, stages)


def whole_parts(p: Problem, ctas: int) -> int:
    """CTAs of every tile, if all have equally many and no CTA more than one tile; else 0."""
    share, rest = divmod(-(-p.n // limits().tile_rows) * p.k_tiles, ctas)
    return p.k_tiles // share if rest == 0 and p.k_tiles % share == 0 else 0


def equal_shares(p: Problem, least: int) -> int:
    """CTAs: as many to every tile, each with ``least`` k tiles or more, or equal shares that cross the tiles' borders
    where those would leave multiprocessors idle."""
    sms, tiles = p.device.sms, -(-p.n // limits().tile_rows)
    parts = max(1, min(sms // tiles, p.k_tiles // least))
    if tiles <= sms and (tiles * parts >= table("spans")["full"] * sms or p.k_tiles // (parts + 1) < least):
        return tiles * parts
    return min(sms, tiles * p.k_tiles)


def _cluster(parts: int) -> int:
    """2 where the CTAs of each tile are clusters of two, whose sums meet without the workspace."""
    return 2 if parts and parts % 2 == 0 else 0
