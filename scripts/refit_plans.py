"""New tables of plans from measured times: see tune_plans.py."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from trirun_kernels.plan.prefill import PrefillCosts, has_int8_tiles, prefill_choices, prefill_plan
from trirun_kernels.plan.problem import Plan, Problem
from trirun_kernels.plan.spans import SpanCosts, kind, span_choices, spans_plan
from trirun_kernels.plan.stream import Stream, facts, stream_candidates, stream_plan
from trirun_kernels.plan.table import parsed, stored, table

Samples = Sequence[tuple[Problem, Mapping[Plan, float]]]
Costs = Mapping[str, Any]  # a table as its file has it
LEAST_GAIN = 0.01  # a rule keeps its plan unless another is faster by so much on average
PRIOR = 0.1  # weight of a cost's present value, as that of a sample whose time is off by that fraction of it


def refitted(family: str, samples: Samples, gpu: str) -> tuple[dict[str, Any], str]:
    """The table of a family made anew from measured seconds, as its file has it, and what changed in words."""
    if family == "stream":
        return refitted_rules(stored("stream"), samples, gpu)
    return refitted_costs(family, stored(family), samples, gpu)


def refitted_rules(old: dict[str, Any], samples: Samples, gpu: str) -> tuple[dict[str, Any], str]:
    """Every rule's first plan becomes the one that loses least, on average, in the problems that the rule decides."""
    new, lines = copy.deepcopy(old), []
    for section in ("act16", "act8_fused", "act8"):
        decided: dict[int, list[tuple[Problem, Mapping[Plan, float]]]] = {}
        for p, times in samples:
            if (section == "act16") == (p.act_bits == 16) and not (section == "act8_fused" and p.quantized):
                rules = parsed(old[section])
                index = next((i for i, rule in enumerate(rules) if rule.holds(facts(p))), None)
                if index is not None:
                    decided.setdefault(index, []).append((p, times))
        for index, problems in sorted(decided.items()):
            rule, fused = new[section][index], {"act8_fused": 1, "act8": 0}.get(section)
            losses = _mean_losses(problems)
            ours = {stream: loss for stream, loss in losses.items() if fused in (None, stream.fused)}
            if not ours:
                continue
            best, present = min(ours, key=ours.__getitem__), _present_loss(problems, rule["plans"])
            text = (
                f"{section} {index}: {len(problems)} problems, loss {present:.1%}, with {list(best)} {ours[best]:.1%}"
            )
            if section == "act8_fused" and min(losses.values()) < ours[best] - LEAST_GAIN:
                text += f", quantized apart {min(losses.values()):.1%}"
            if ours[best] < present - LEAST_GAIN:
                rule["plans"] = [list(best), *(plan for plan in rule["plans"] if plan != list(best))]
            lines.append(("changed " if rule != old[section][index] else "kept    ") + text)
    new["device"] = gpu
    return new, "\n".join(lines)


def _mean_losses(problems: Samples) -> dict[Stream, float]:
    """Mean loss against the fastest plan, of plans that all problems have."""
    by_problem = []
    for p, times in problems:
        fastest, streams = min(times.values()), {stream: stream_plan(p, stream) for stream in stream_candidates(p)}
        by_problem.append({s: times[plan] / fastest - 1 for s, plan in streams.items() if plan in times})
    common = set.intersection(*(set(losses) for losses in by_problem))
    return {stream: statistics.mean(losses[stream] for losses in by_problem) for stream in common}


def _present_loss(problems: Samples, plans: Sequence[Sequence[int]]) -> float:
    """Mean loss of a rule's plans as they are taken, the first that fits; where none was measured, infinite."""
    losses = []
    for p, times in problems:
        taken = (times[plan] for plan in (stream_plan(p, Stream(*fields)) for fields in plans) if plan in times)
        losses.append(next(taken, math.inf) / min(times.values()) - 1)
    return statistics.mean(losses)


def refitted_costs(family: str, old: dict[str, Any], samples: Samples, gpu: str) -> tuple[dict[str, Any], str]:
    """Costs by least squares: seconds of every plan against the model's cycles, each relative to its time, with a pull
    towards the present value that decides where measurements do not. The model is linear in its costs, so that
    differences are its derivatives."""
    predict = {"spans": predicted_spans, "prefill": predicted_prefill}[family]
    pairs = [(p, plan, seconds) for p, times in samples for plan, seconds in times.items()]
    times = torch.tensor([seconds for _, _, seconds in pairs], dtype=torch.float64)

    def model(costs: Costs) -> torch.Tensor:
        found = {id(t): predict(costs, p) for p, t in samples}
        values = [found[id(t)].get(plan, float("nan")) for p, t in samples for plan in t]
        return torch.tensor(values, dtype=torch.float64)

    base = model(old)
    known = base.isfinite()  # plans without a place in the table
    columns, paths = [], list(leaves(old["cycles"]))
    for path in paths:
        moved = copy.deepcopy(old)
        value = at(moved["cycles"], path)
        step = value or 1.0
        put(moved["cycles"], path, value + step)
        columns.append((model(moved) - base)[known] / step)
    jacobian, times, base = torch.stack(columns, 1) / times[known, None], times[known], base[known]
    present = torch.tensor([at(old["cycles"], path) for path in paths], dtype=torch.float64)
    scale = present.abs().clamp(min=1e-9)
    pull = torch.diag((PRIOR / scale).where(present != 0, torch.tensor(1e12, dtype=torch.float64)))
    wanted = torch.cat([1 - base / times, torch.zeros(len(paths), dtype=torch.float64)])
    change = torch.linalg.lstsq(torch.cat([jacobian, pull]), wanted, driver="gelsd").solution
    fitted = (present + change).clamp(present / 2, present * 2)
    new = copy.deepcopy(old)
    for path, value in zip(paths, fitted.tolist(), strict=True):
        put(new["cycles"], path, float(f"{value:.3g}"))
    new["device"] = gpu
    lines = [f"{family}: {len(times)} plans of {len(samples)} problems"]
    means = []
    for name, costs in (("present", old), ("fitted", new)):
        off = (model(costs)[known] / times - 1).abs().mean()
        losses = [_loss(predict(costs, p), t) for p, t in samples]
        means.append(statistics.mean(losses))
        worst = f"{max(losses):.1%} at worst"
        lines.append(f"{name}: times off by {off:.1%}, choices lose {means[-1]:.1%} on average, {worst}")
    if means[1] > means[0]:
        return copy.deepcopy(old), "\n".join([*lines, "the present costs choose better: kept"])
    for path, before, after in zip(paths, present.tolist(), fitted.tolist(), strict=True):
        if abs(after - before) > 0.02 * abs(before):
            lines.append(f"  {' '.join(map(str, path))}: {before:g} -> {after:.3g}")
    return new, "\n".join(lines)


def _loss(predictions: Mapping[Plan, float], times: Mapping[Plan, float]) -> float:
    measured = {plan: seconds for plan, seconds in predictions.items() if plan in times}
    return times[min(measured, key=measured.__getitem__)] / min(times[plan] for plan in measured) - 1


def predicted_prefill(costs: Costs, p: Problem) -> dict[Plan, float]:
    """Seconds of every tile's plan by the model."""
    ns = table("choice")["spans_or_prefill"]
    cycle = ns["int8" if has_int8_tiles(p) else "group_128" if p.grouped else "channel"]["prefill"]
    choices = prefill_choices(p, PrefillCosts(**parsed(costs["cycles"])))
    return {prefill_plan(p, tile): 1e-9 * cycle * cycles for cycles, tile in choices}


def predicted_spans(costs: Costs, p: Problem) -> dict[Plan, float]:
    """Seconds of every tile's plan by the model, with those until x is quantized."""
    ns = table("choice")["spans_or_prefill"]["int8" if p.limbs == 1 else kind(p)]
    cycles = parsed(costs["cycles"])
    choices = span_choices(p, SpanCosts(**cycles[kind(p)], odd=cycles["odd"]))
    return {spans_plan(p, tile): 1e-9 * (ns["fixed"] + ns["span"] * count) for count, tile in choices}


Path = tuple[str | int, ...]


def leaves(entry: Any, path: Path = ()) -> Iterator[Path]:
    """Where a table has numbers."""
    if isinstance(entry, (int, float)):
        yield path
        return
    items: Any = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, value in items:
        if key != "about":
            yield from leaves(value, (*path, key))


def at(entry: Any, path: Path) -> float:
    for key in path:
        entry = entry[key]
    return entry


def put(entry: Any, path: Path, value: float) -> None:
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
