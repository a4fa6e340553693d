"""Measures plans of the CUDA kernels on this GPU and writes the tables that ``trirun_kernels.plan`` chooses by.

    python scripts/tune_plans.py --dry-run
    python scripts/tune_plans.py --kernels stream --shapes llama-2-7b,8192x8192 --m 1,4 --minutes 5
    python scripts/tune_plans.py --check

Every problem gets all plans of its kernel family: each is checked against float64, then timed (captured in a graph,
over weights that no cache holds, plans interleaved); the fastest and the present choice are timed again for longer.
Measurements are appended to ``measurements.jsonl`` in ``--out`` problem by problem, so that a run can be stopped and
continued. From all of them the tables are made anew and written beside it: rules of the stream kernel get the plan that
loses least, costs of the others are fitted by least squares. ``--write`` puts the tables where the package reads them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from measure_plans import Gpu, Timer
from refit_plans import refitted
from trirun_kernels.plan.candidates import FAMILIES, candidates, chosen, takes
from trirun_kernels.plan.problem import Device, Plan, Problem
from trirun_kernels.plan.select import select
from trirun_kernels.plan.table import FOLDER, written

ROWS = {"stream": (1, 2, 4, 8), "spans": (8, 16, 32), "prefill": (8, 16, 32, 64, 128, 256, 1024)}  # where not named
SECONDS_OF_A_PLAN = 0.02  # what a plan of the first look takes, its capture and check included
FIRST_LOOK, AGAIN = 0.003, 8  # seconds per plan; plans timed again for --seconds


@dataclass(frozen=True, slots=True)
class Task:
    """One problem for one kernel family."""

    family: str
    problem: Problem

    @property
    def key(self) -> str:
        p = self.problem
        x = ", quantized x" if p.quantized else ""
        return f"{self.family} {p.n}x{p.k} m={p.m} group_size={p.group_size} act_bits={p.act_bits}{x}"


@cache
def plans(task: Task) -> tuple[Plan, ...]:
    """All plans to measure, the present choice first."""
    present = chosen(task.family, task.problem)
    return tuple(dict.fromkeys([*([present] if present else []), *candidates(task.family, task.problem)]))


def tasks(
    families: Iterable[str],
    shapes: Iterable[tuple[int, int]],
    rows: Sequence[int] | None,
    act_bits: Sequence[int],
    group_sizes: Sequence[int],
    device: Device,
) -> Iterator[Task]:
    """What there is to measure: problems that a family has plans for."""
    for (n, k), family, bits, group in product(shapes, families, act_bits, group_sizes):
        for m, quantized in product(rows or ROWS[family], (False, True)):
            p = Problem(-(-n // 64) * 64, -(-k // 128) * 128, m, group, bits, device, quantized=quantized)
            if takes(family, p):
                yield Task(family, p)


def measure(
    todo: Sequence[Task],
    known: dict[str, dict[Plan, float]],
    timer: Timer,
    file: Path,
    *,
    minutes: float,
    seconds: float,
    progress: Callable[[str], None],
) -> int:
    """Measure tasks that are not known until the time is over, and append each to ``file``. Tasks left."""
    end, left = time.monotonic() + 60 * minutes, [task for task in todo if task.key not in known]
    while left and time.monotonic() < end:
        task = left.pop(0)
        found = timer.times(task.problem, plans(task), FIRST_LOOK)
        present = plans(task)[:1] if plans(task)[:1] and plans(task)[0] in found else ()
        again = dict.fromkeys([*present, *sorted(found, key=found.__getitem__)[:AGAIN]])
        found |= timer.times(task.problem, list(again), seconds)
        known[task.key] = found
        microseconds = {",".join(map(str, plan)): round(t * 1e6, 3) for plan, t in found.items()}
        append(file, json.dumps({"gpu": timer.name, "task": task.key, "us": microseconds}))
        progress(described(task, found))
    return len(left)


def append(file: Path, line: str) -> None:
    """Add a line; what a stop has left of another one stays a line of its own."""
    with file.open("a+b") as out:
        end = out.seek(0, 2)
        out.seek(max(0, end - 1))
        broken = end > 0 and out.read(1) != b"\n"
        out.write(("\n" * broken + line + "\n").encode())


def read(file: Path, gpu: str) -> dict[str, dict[Plan, float]]:
    """Seconds of plans by task, as :func:`measure` appended them; a line that a stop cut short is left out."""
    known: dict[str, dict[Plan, float]] = {}
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line["gpu"] == gpu:
            known[line["task"]] = {Plan(*map(int, p.split(","))): us * 1e-6 for p, us in line["us"].items()}
    return known


def described(task: Task, found: Mapping[Plan, float]) -> str:
    """A problem's best plans, the present choice and what it loses."""
    best, present = sorted(found, key=found.__getitem__)[:3], plans(task)[0]
    lost = f"loses {loss(task, found):.1%}" if present in found else "is wrong"
    lines = [f"{task.key}: {len(found)} plans, the present one {lost}"]
    for plan in dict.fromkeys([*best, *([present] if present in found else [])]):
        fields = ", ".join(f"{name}={value}" for name, value in plan._asdict().items() if value)
        lines.append(f"  {found[plan] * 1e6:8.2f} us  {fields}{'  (present)' if plan == present else ''}")
    return "\n".join(lines)


def loss(task: Task, found: Mapping[Plan, float]) -> float:
    """What the present choice takes more than the fastest plan, as a fraction of that."""
    return found[plans(task)[0]] / min(found.values()) - 1


def losses(todo: Sequence[Task], known: Mapping[str, Mapping[Plan, float]]) -> dict[str, dict[str, Any]]:
    """Mean and worst loss of the present tables: of every family by itself, and of ``select`` among them."""
    by_family: dict[str, dict[str, float]] = {}
    by_problem: dict[Problem, dict[Plan, float]] = {}
    for task in todo:
        found = known.get(task.key, {})
        if plans(task)[0] in found:
            by_family.setdefault(task.family, {})[task.key] = loss(task, found)
            by_problem.setdefault(task.problem, {}).update(found)
    for p, found in by_problem.items():
        plan = select(p.n, p.k, p.m, p.group_size, p.act_bits, p.device, quantized=p.quantized)
        if plan in found:  # its family was measured
            key = f"{p.n}x{p.k} m={p.m} group_size={p.group_size} act_bits={p.act_bits} quantized={p.quantized}"
            by_family.setdefault("select", {})[key] = found[plan] / min(found.values()) - 1
    return {
        name: {
            "problems": len(found),
            "mean": statistics.mean(found.values()),
            "worst": max(found.values()),
            "worst_problem": max(found, key=found.__getitem__),
        }
        for name, found in by_family.items()
    }


def main(arguments: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    """The command. ``timer``: instead of this machine's GPU."""
    from trirun_cli.bench.shapes import parse_shapes

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(FAMILIES), help="families, of %(default)s")
    parser.add_argument("--shapes", default="default,llama-2-7b,bitnet-2b", help="lists of configs/shapes.yaml, or NxK")
    parser.add_argument("--m", type=numbers, help="rows of x; each family has its own")
    parser.add_argument("--act-bits", type=numbers, default=(16, 8))
    parser.add_argument("--group-sizes", type=numbers, default=(-1, 128))
    parser.add_argument("--out", type=Path, default=Path("build/tune"))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no problem after so long")
    parser.add_argument("--seconds", type=float, default=0.05, help="of the plans that are timed again")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured, and how long it takes")
    parser.add_argument("--check", action="store_true", help="measure and report; make no tables")
    parser.add_argument("--write", action="store_true", help="also replace the tables that the package reads")
    parser.add_argument("--json", action="store_true", help="print the losses as JSON alone")
    options = parser.parse_args(arguments)
    families = options.kernels.split(",")
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"--kernels {','.join(unknown)}: none of {', '.join(FAMILIES)}")
    shapes = [(shape.n, shape.k) for shape in parse_shapes(options.shapes, "default")]
    if timer is None and not options.dry_run:
        timer = Gpu()
    device = timer.device if timer else Device(90, 132)  # a dry run needs no GPU
    todo = list(tasks(families, shapes, options.m, options.act_bits, options.group_sizes, device))
    if options.dry_run:
        counts = [len(plans(task)) for task in todo]
        for task, count in zip(todo, counts, strict=True):
            print(f"{task.key}: {count} plans")
        again = len(todo) * (AGAIN + 1) * options.seconds
        total = sum(counts) * SECONDS_OF_A_PLAN + again
        print(f"{len(todo)} problems, {sum(counts)} plans, about {total / 60:.0f} minutes")
        return 0
    assert timer is not None
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "measurements.jsonl"
    known = read(file, timer.name)
    say = (lambda text: None) if options.json else partial(print, flush=True)
    left = measure(todo, known, timer, file, minutes=options.minutes, seconds=options.seconds, progress=say)
    found = losses(todo, known)
    for name, of in found.items():
        worst = f"{of['worst']:.1%} at worst ({of['worst_problem']})"
        say(f"{name}: {of['problems']} problems, loss {of['mean']:.1%} on average, {worst}")
    say(f"{left} of {len(todo)} problems are left" + (": the same command goes on with them" if left else ""))
    if options.json:
        print(json.dumps({"gpu": timer.name, "left": left, "loss": found, "wrong": timer.wrong}, indent=2))
    if timer.device.arch != 90:
        say("no table is made: they are those of compute capability 9.0, which other GPUs scale")
    for family in () if options.check or timer.device.arch != 90 else families:
        samples = [(t.problem, known[t.key]) for t in todo if t.family == family and t.key in known]
        if samples:
            new, report = refitted(family, samples, timer.name)
            say(report)
            for folder in (options.out, *([FOLDER] if options.write else [])):
                (folder / f"{family}.json").write_text(written(new))
    for wrong in timer.wrong:
        print(wrong, file=sys.stderr)
    return 1 if timer.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
