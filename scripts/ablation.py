"""What each piece of the quantizer is worth on a real model: perplexity, divergence and time with pieces on and off.

    python scripts/ablation.py MODEL --calibration calibration.txt --valid valid.txt --out ablation --seeds 0,1,2

writes ablation.json and ablation.md: perplexity, KL divergence, minutes and peak memory (of the GPU, or of the process
on a CPU). The pieces and the presets are measured with every seed of --seeds (another sample of the text each), other
choices with the first; rows can be chosen with --only REGEX. --jobs N measures N rows at a time, on one device, and the
table says so. What ablation.json holds already is not measured again.

The protocol is that of quality.py.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import multiprocessing
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

# quality finds the package in a checkout.
from quality import Bench, arguments, peak_bytes, preset, write
from trirun_gptq.calibration import load
from trirun_gptq.recipe import Recipe

NEAREST = "round to nearest"
PLAIN = {"clip": False, "act_order": False, "sweeps": 0, "refit": False, "sequential": False, "correction": 0.0}
PIECES = [
    {"clip": True},
    {"act_order": True},
    {"sweeps": 2},
    {"refit": True},
    {"sequential": True},
    {"correction": 0.5},
]


@dataclass(frozen=True, slots=True)
class Row:
    """What one line of the table measures; ``recipe`` None is the original model, ``seeded`` follows ``--seeds``."""

    label: str
    recipe: Recipe | None
    seeded: bool = False


def rows() -> list[Row]:
    """Every row, in the table's order."""
    fast, default, best = map(preset, ("fast", "default", "best"))
    replace = dataclasses.replace
    signed = replace(fast, grid="signed")
    settings = dict(PLAIN)
    table = [Row("original", None), Row(NEAREST, signed), Row("plain GPTQ", replace(signed, **settings), True)]
    for piece in PIECES:
        settings.update(piece)
        label = "+ " + ", ".join(f"{key} {value}" for key, value in piece.items())
        table.append(Row(label, replace(signed, **settings), True))
    table += [Row("fast", fast, True), Row("default", default, True), Row("best", best, True)]
    # Other choices of one preset, grids by group sizes first.
    for grid in ("signed", "midrise", "zero", "ternary"):
        for size in (128, 64, 32, -1):
            table.append(Row(f"fast, grid {grid}, group {size}", replace(fast, grid=grid, group_size=size)))
    table += [
        *(Row(f"default, grid {grid}", replace(default, grid=grid)) for grid in ("signed", "midrise", "zero")),
        Row("default, without end to end", replace(default, e2e_steps=0)),
        Row("default, method gumbel", replace(default, engines=("gumbel",))),
        Row("default, end to end, cross entropy 0.3", replace(default, e2e_ce=0.3)),
        Row("best, scales alone end to end", replace(best, e2e_code_steps=0)),
        Row("best, 384 steps of codes end to end", replace(best, e2e_code_steps=384)),
        Row("best, codes end to end at rate 0.01", replace(best, e2e_code_lr=0.01)),
        *(Row(f"best, method {method}", replace(best, engines=(method,))) for method in ("ste", "gumbel")),
        Row("fast, correction 1.0", replace(fast, correction=1.0)),
        Row("fast, damp 0.01", replace(fast, damp=0.01)),
        Row("fast, 512 samples", replace(fast, samples=512)),
        Row("fast, natural length", replace(fast, natural_length=True)),
    ]
    return table


def measure(bench: Bench, row: Row, seed: int, calibration: str) -> dict:
    """One row with one seed."""
    started, recipe, bits, peak = time.perf_counter(), row.recipe, 16.0, 0
    if recipe is None:
        model = bench.model
    elif row.label == NEAREST:
        model, bits = bench.nearest(recipe), 2 + 16 / recipe.group_size
    else:
        recipe = dataclasses.replace(recipe, seed=seed)
        model, report = bench.quantized(recipe, load(calibration, bench.tokenizer, recipe))
        bits, peak = report.bits_per_weight, peak_bytes(report)
    seconds = time.perf_counter() - started
    perplexity, divergence = bench.score(model)
    return {
        "row": row.label,
        "perplexity": perplexity,
        "kl": divergence,
        "bits": bits,
        "seconds": seconds,
        "peak_bytes": peak,
        "device": bench.device,
        "windows": len(bench.windows),
        "seed": seed,
        "recipe": recipe.to_dict() if recipe else None,
    }


def repeats(result: dict, row: Row, conditions: dict) -> bool:
    """Whether a result is of the row as it is now and of the same conditions."""
    recipe = None if row.recipe is None else dataclasses.replace(row.recipe, seed=result["seed"]).to_dict()
    return result["recipe"] == recipe and result | conditions == result


made_bench = functools.cache(Bench)  # one in each process


def measure_task(bench: tuple, calibration: str, row: Row, seed: int) -> dict:
    """:func:`measure` on the bench of these arguments."""
    return measure(made_bench(*bench), row, seed, calibration)


def measurements(bench: tuple, calibration: str, tasks: list[tuple[Row, int]], jobs: int) -> Iterator[dict]:
    """Every row with its seed, as they are done: here, or in ``jobs`` processes that share the device, the long ones
    first. What fails is raised when the others are done.

    Args:
        bench: the arguments of :class:`Bench`.
    """
    if jobs == 1:
        yield from (measure_task(bench, calibration, row, seed) for row, seed in tasks)
        return
    tasks = sorted(tasks, key=lambda task: -training_steps(task[0].recipe))
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(measure_task, bench, calibration, row, seed) for row, seed in tasks]
        failed = None
        for done in concurrent.futures.as_completed(waiting):
            if done.exception() is None:
                yield done.result()
            failed = failed or done.exception()
        if failed is not None:
            raise failed


def training_steps(recipe: Recipe | None) -> int:
    """By every method in a block, and end to end: what decides about the time that a row takes."""
    if recipe is None:
        return 0
    return recipe.refine_steps * len(recipe.engines) + recipe.e2e_steps + recipe.e2e_code_steps


def table(results: list[dict]) -> str:
    """One line per row of the ablation, over its seeds, as Markdown: the mean, and ± half the range."""
    base = next((r["perplexity"] for r in results if r["row"] == "original"), math.nan)
    lines = ["| | perplexity | ratio | KL | bits per weight | minutes | peak MiB | seeds |", "|---" + "|--:" * 7 + "|"]
    for label in dict.fromkeys(r["row"] for r in results):
        runs = [r for r in results if r["row"] == label]
        perplexities = [r["perplexity"] for r in runs]
        mean, spread = sum(perplexities) / len(runs), (max(perplexities) - min(perplexities)) / 2
        shown = f"{mean:.2f} ± {spread:.2f}" if len(runs) > 1 else f"{mean:.2f}"
        divergence = sum(r["kl"] for r in runs) / len(runs)
        minutes, peak = max(r["seconds"] for r in runs) / 60, max(r["peak_bytes"] for r in runs) / 2**20
        lines.append(
            f"| {label} | {shown} | {mean / base:.3f} | {divergence:.3f} | {runs[0]['bits']:.3f} | {minutes:.2f} | "
            f"{peak:.0f} | {len(runs)} |"
        )
    jobs = max(r["jobs"] for r in results)
    if jobs > 1:
        lines += ["", f"Up to {jobs} rows at a time shared the device: minutes say something beside each other only."]
    return "\n".join(lines) + "\n"


def in_order(results: list[dict]) -> list[dict]:
    """As the table has them."""
    order = {row.label: at for at, row in enumerate(rows())}
    return sorted(results, key=lambda r: (order[r["row"]], r["seed"]))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0", help="comma-separated; the mean of them and their spread are shown")
    parser.add_argument("--jobs", type=int, default=1, help="rows measured at a time, all on one device")
    options = parser.parse_args()

    seeds = [int(seed) for seed in options.seeds.split(",")]
    chosen = [row for row in rows() if re.search(options.only, row.label)]
    tasks = [(row, seed) for row in chosen for seed in (seeds if row.seeded else seeds[:1])]
    file = options.out.with_suffix(".json")
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    conditions = {"device": options.device, "windows": options.windows}
    known = {row.label: row for row in rows()}
    results = [r for r in results if r["row"] in known and repeats(r, known[r["row"]], conditions)]
    done = {(r["row"], r["seed"]) for r in results}
    tasks = [(row, seed) for row, seed in tasks if (row.label, seed) not in done]
    bench = (options.model, options.valid, options.windows, options.device)
    for result in measurements(bench, options.calibration, tasks, options.jobs):
        results.append(result | {"jobs": options.jobs})
        print("{row:40s} seed {seed} {perplexity:9.3f} {kl:8.4f} {seconds:7.1f} s".format(**result), flush=True)
        results = in_order(results)
        write(options.out, results, table(results))


if __name__ == "__main__":
    main()
