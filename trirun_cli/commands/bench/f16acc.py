"""``trirun bench f16acc``: the fp16-accumulating product, in speed and in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...console import Console
from ..shared.options import Device, Json, Quiet, Threads
from .measuring import check_measuring, check_plot, measuring_device, positive_numbers

if TYPE_CHECKING:
    from ...bench.f16acc import Error, Speed


def command(
    sizes: Annotated[
        str | None, typer.Option(help="Comma-separated sides of square products. Default: 512 to 8192 on a GPU.")
    ] = None,
    splits: Annotated[str, typer.Option(help="Comma-separated numbers of chunks of k.")] = "1,2,4,8,16,32,64",
    seconds: Annotated[float, typer.Option(help="Measuring time per contestant and size.")] = 0.2,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: speed over sizes, error over splits.")] = None,
    threads: Threads = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time f16acc_gemm beside cuBLAS with fp32 and with fp16 sums, and measure the errors of all against float64.

    Sizes default to 512 ... 8192 on a GPU; a CPU runs the slow reference, so nothing is timed there unless asked.
    Every product is checked first; a wrong one ends the run with exit code 6. Beside: gpu_poor's figures on an H200.

    Example: trirun bench f16acc --sizes 2048,4096,8192 --plot f16acc.png
    """
    counts = positive_numbers("--splits", splits)
    check_measuring(seconds)
    sides = None if sizes is None else positive_numbers("--sizes", sizes)
    console = Console(as_json=json, quiet=quiet)
    place, load = measuring_device(console, device, threads)
    import torch

    if sides is None:
        sides = [512, 1024, 2048, 3072, 4096, 6144, 8192] if place.type == "cuda" else []
    from ...bench import f16acc as f16acc_bench

    check_plot(plot)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU (reference)"
    measured, found = [], []
    with console.progress("products", len(sides) * len(f16acc_bench.contestants(place)) + len(counts)) as bar:
        for speed in f16acc_bench.speeds(sides, place, seconds):
            measured.append(speed)
            bar.advance()
        for error in f16acc_bench.errors(counts, place):
            found.append(error)
            bar.advance()
    from dataclasses import asdict

    console.json(
        "bench.f16acc/1",
        {
            "device": str(place),
            "name": name,
            "torch": torch.__version__,
            "busy": load,
            "speeds": [asdict(s) | {"tflops": s.tflops} for s in measured],
            "errors": [asdict(e) for e in found],
        },
    )
    _print(console, name, measured, found)
    if plot is not None:
        from ...bench.plot import save_f16acc_plot

        save_f16acc_plot(plot, name, measured, found)
        console.note(f"wrote {plot}")


def _print(console: Console, name: str, measured: Sequence[Speed], found: Sequence[Error]) -> None:
    from ...bench.f16acc import ORIGINAL_ERRORS, ORIGINAL_TFLOPS, PICTURE_K, PICTURE_N

    names = list(dict.fromkeys(s.contestant for s in measured))
    if measured:
        cells = {(s.size, s.contestant): s for s in measured}
        rows = [
            [f"{size}³", *(f"{cells[size, c].us:.1f}" for c in names), *(f"{cells[size, c].tflops:.1f}" for c in names)]
            for size in dict.fromkeys(s.size for s in measured)
        ]
        console.table(
            f"{name}: square products; medians. gpu_poor on an H200 reaches "
            f"{ORIGINAL_TFLOPS[0]:.0f} to {ORIGINAL_TFLOPS[1]:.0f} TFLOP/s at 4096³",
            ["m = n = k", *(f"{c} µs" for c in names), *(f"{c} TFLOP/s" for c in names)],
            rows,
        )
    original = {splits: (largest, rms) for splits, largest, rms in ORIGINAL_ERRORS}
    rows = []
    for e in found:
        label = e.contestant if e.contestant != "trirun" else f"splits = {e.splits}" if e.splits else "default"
        theirs = original.get(e.splits) if e.contestant == "trirun" else None
        rows.append(
            [label, str(e.chunk or "–"), f"{e.rms:.4f}", f"{e.median:.4f}", f"{e.largest:.4f}"]
            + ([f"{theirs[1]:.4f}", f"{theirs[0]:.3f}"] if theirs else ["–", "–"])
        )
    console.table(
        f"|error| against float64, one row, k = {PICTURE_K}, n = {PICTURE_N}; gpu_poor's measured on an H200",
        ["sums of k", "columns in fp16", "RMS", "median", "largest", "gpu_poor RMS", "gpu_poor largest"],
        rows,
    )
