"""The stream kernel (mma.sync, each warp with weights of its own): how warps and CTAs divide a product.

Which plan is fastest is measured, not modelled: ``tables/stream.json`` has a class of problems in every rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from .problem import STREAM, STREAM_SM80, Plan, Problem
from .shared import shared_bytes, shared_limit
from .table import Facts, first, table

SM_SHARED = 1024  # bytes that a resident CTA takes beside what it asks for


class Stream(NamedTuple):
    """``warps`` of a CTA, of which ``warp_split`` share an n tile along k; CTAs of a cluster that share it too; stages
    of a warp's ring; CTAs for every multiprocessor; whether x is quantized in the prologue."""

    warps: int
    warp_split: int
    cta_split: int
    stages: int
    ctas_per_sm: int
    fused: int = 0


def choose_stream(p: Problem) -> Plan | None:
    """The first of the tabled plans that fits; None where x fits no CTA."""
    for stream in stream_plans(p):
        if stream.cta_split > max(1, p.k_tiles):
            continue
        plan = stream_plan(p, stream)
        shared = shared_bytes(p, plan)
        if shared < 0 or _held(p, shared) < stream.ctas_per_sm:
            continue
        if not _has_clusters(p) or stream in _smaller() or _runs_at_once(p, plan, shared):
            return plan
    return None


def stream_plans(p: Problem) -> list[Stream]:
    """The tabled plans for a problem, best first, whether they fit or not."""
    rules, known = table("stream"), facts(p)
    best: list[Stream] = []
    for name in ("act16",) if p.act_bits == 16 else ("act8",) if p.quantized else ("act8_fused", "act8"):
        best += (Stream(*plan) for plan in first(rules[name], known) or ())
    smaller = _smaller()
    # Without clusters CTAs meet in the workspace, for twice the time: warps of one CTA do their work if x fits it.
    return [*best, *smaller] if _has_clusters(p) else [*map(_alone, best), smaller[0], *best, *smaller]


def facts(p: Problem) -> Facts:
    """What the rules of ``tables/stream.json`` ask for."""
    return {
        "n_tiles_per_sm": p.n_tiles / p.device.sms,
        "k": p.k,
        "m": p.m,
        "x": "quantized" if p.quantized else "values",
        "scale": p.scale,
    }


def stream_plan(p: Problem, stream: Stream) -> Plan:
    """The plan as the kernel takes it: no more parts of k than there are k tiles, no prologue that x cannot have."""
    return Plan(
        STREAM if _has_clusters(p) else STREAM_SM80,
        warps=stream.warps,
        warp_split=min(stream.warp_split, _floor_power(p.k_tiles // stream.cta_split)),
        cta_split=stream.cta_split,
        stages=stream.stages,
        ctas=p.device.sms * stream.ctas_per_sm,
        fused=int(stream.fused and not p.apart),
    )


def stream_candidates(p: Problem) -> Iterator[Stream]:
    """Every plan that the kernel runs for a problem and whose CTAs are all resident: what a sweep has to measure."""
    fused = (0,) if p.quantized or p.apart or p.wide else (0, 1)
    for fields in product((4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4, 8), (2, 3, 4, 6), (1, 2, 3), fused):
        stream = Stream(*fields)
        if stream.warps % stream.warp_split or stream.warps * stream.ctas_per_sm > 16:
            continue
        if stream.warp_split * stream.cta_split > p.k_tiles or (stream.cta_split > 1 and not _has_clusters(p)):
            continue
        tiles = -(-p.n_tiles // (stream.warps // stream.warp_split))
        if p.device.sms * (stream.ctas_per_sm - 1) >= tiles * stream.cta_split:
            continue  # fewer for every multiprocessor are enough: the same launch
        plan = stream_plan(p, stream)
        shared = shared_bytes(p, plan)
        if shared >= 0 and _held(p, shared) >= stream.ctas_per_sm and _runs_at_once(p, plan, shared):
            yield stream


@cache
def _smaller() -> list[Stream]:
    return [Stream(*plan) for plan in table("stream")["smaller"]]


def _has_clusters(p: Problem) -> bool:
    return p.device.arch >= 90


def _held(p: Problem, shared: int) -> int:
    """CTAs of so many bytes of shared memory that a multiprocessor holds."""
    return (shared_limit(p.device.arch) + SM_SHARED) // (shared + SM_SHARED)


def _runs_at_once(p: Problem, plan: Plan, shared: int) -> bool:
    """Whether all clusters are resident: those that find no room beside the others would wait for these to end."""
    tiles = -(-p.n_tiles // (plan.warps // plan.warp_split))
    held = min(16 // plan.warps, _held(p, shared))
    return min(tiles, plan.ctas // plan.cta_split) <= p.device.clusters(plan.cta_split) * held


def _alone(stream: Stream) -> Stream:
    """The plan with the warps of a CTA where it has CTAs of a cluster."""
    if stream.cta_split == 1:
        return stream
    warps = max(8, stream.warps)
    per_sm = (stream.ctas_per_sm * stream.warps + 4) // 8 if stream.warps < 8 else stream.ctas_per_sm
    return Stream(warps, min(stream.warp_split * stream.cta_split, warps), 1, stream.stages, per_sm, stream.fused)


def _floor_power(v: int) -> int:
    return 1 << max(v, 1).bit_length() - 1
