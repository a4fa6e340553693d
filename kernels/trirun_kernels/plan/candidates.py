"""The kernel families and every plan that one has for a problem: what tuning measures, and what is chosen among."""

from __future__ import annotations

from ..native import limits
from .prefill import Tile, choose_prefill, has_int8_tiles, prefill_choices, prefill_plan
from .problem import Plan, Problem
from .spans import SpanTile, choose_fused_spans, choose_spans, span_choices, spans_plan
from .stream import Stream, choose_stream, stream_candidates, stream_plan

FAMILIES = ("stream", "spans", "prefill")  # with a table each


def takes(family: str, p: Problem) -> bool:
    """Whether a family has kernels for a problem that differ from those for another: 8-bit activations of grouped
    weights prefill as 16-bit ones do."""
    if family == "stream":
        return p.m * p.limbs <= 16
    if p.device.arch != 90 or p.quantized:
        return False
    if family == "prefill":
        return p.act_bits == 16 or has_int8_tiles(p)
    scales = not p.grouped or (p.group_size == limits().k_tile and p.act_bits == 16)
    return scales and p.m * p.limbs > 8 and p.m <= limits().decode_rows


def candidates(family: str, p: Problem) -> dict[Plan, Stream | SpanTile | Tile | None]:
    """Plans of a family for a problem, with what its table knows each by (None: no entry)."""
    if family == "stream":
        return {stream_plan(p, stream): stream for stream in stream_candidates(p)}
    if family == "prefill":
        return {prefill_plan(p, tile): tile for _, tile in prefill_choices(p)}
    plans: dict[Plan, Stream | SpanTile | Tile | None] = {spans_plan(p, tile): tile for _, tile in span_choices(p)}
    fused = choose_fused_spans(p) if p.act_bits == 16 and not p.apart else None
    return plans if fused is None else plans | {fused: None}


def chosen(family: str, p: Problem) -> Plan | None:
    """The plan that the family's table has for a problem; None where it fits no CTA."""
    if family == "stream":
        return choose_stream(p)
    return choose_prefill(p) if family == "prefill" else choose_spans(p, fuses=p.act_bits == 16 and not p.apart)
