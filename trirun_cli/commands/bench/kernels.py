"""``trirun bench kernels``: the int2 products of a list of shapes, beside their peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...console import Console
from ...errors import UsageError
from ..shared.options import Device, DType, Json, Quiet, Threads, check_machine, completes
from .measuring import check_measuring, check_plot, end_gathering, gather, measuring_device, positive_numbers

if TYPE_CHECKING:
    from ...bench.kernels import Machine, Result


def command(
    shapes: Annotated[
        str | None, typer.Option(help="Comma-separated: NxK, or lists such as llama-2-7b, bitnet-2b, trirun.")
    ] = None,
    m: Annotated[str, typer.Option(help="Comma-separated numbers of rows of x.")] = "1,4,16,64,256,1024",
    group_size: Annotated[
        int,
        typer.Option(
            help="Weights per scale: 32, 64, 128, or -1 for a whole row.",
            autocompletion=completes("32", "64", "128", "-1"),
        ),
    ] = -1,
    act_bits: Annotated[int, typer.Option(help="Activation bits, 16 or 8.", autocompletion=completes("16", "8"))] = 16,
    accumulate: Annotated[
        str,
        typer.Option(help="Type of the sums: fp32, or fp16 for float16 x.", autocompletion=completes("fp32", "fp16")),
    ] = "fp32",
    seconds: Annotated[float, typer.Option(help="Measuring time per contestant and cell.")] = 0.2,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: roofline, and speed-up over m.")] = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time int2_gemm beside torch's dense product, Humming where installed, and the pure reading of its weights.

    Every product is checked against float64 first; a wrong one ends the run with exit code 6. Weights rotate past the
    caches; on CUDA, calls run in graphs. Times are medians in microseconds. Ctrl-C shows what has been measured.

    Example: trirun bench kernels --shapes llama-2-7b --m 1,16 --plot bench.png
    """
    from ...bench.shapes import parse_shapes

    rows = positive_numbers("--m", m)
    check_machine(dtype, act_bits, threads=threads)
    check_measuring(seconds, group_size)
    if accumulate not in ("fp32", "fp16") or (accumulate == "fp16" and (act_bits != 16 or dtype != "float16")):
        raise UsageError(f"--accumulate {accumulate}: fp32, or fp16 with --dtype float16 and --act-bits 16")
    console = Console(as_json=json, quiet=quiet)
    place, load = measuring_device(console, device, threads)
    import torch

    chosen = parse_shapes(shapes, "cpu" if place.type == "cpu" else "default")
    for shape in chosen:
        if group_size > 0 and shape.k % group_size:
            raise UsageError(f"--group-size {group_size} does not divide k of {shape}")
    check_plot(plot)
    from ...bench.kernels import measure_machine, run

    kind = ("float32" if place.type == "cpu" else "float16") if dtype == "auto" else dtype
    console.note("measuring memory and arithmetic")
    limits = measure_machine(place)
    total = len(chosen) * len(rows)
    with console.progress("kernels", total) as bar:
        cells = run(
            chosen,
            rows,
            device=place,
            dtype=getattr(torch, kind),
            group_size=group_size,
            act_bits=act_bits,
            machine=limits,
            seconds=seconds,
            accumulate=accumulate,
            progress=bar.describe,
        )
        results = gather(cells, bar)
    from dataclasses import asdict

    documents = [result.document(limits) for result in results]
    complete = len(results) == total
    facts = {"machine": asdict(limits), "busy": load, "complete": complete}
    console.json("bench.kernels/2", facts | {"results": documents})
    _print(console, limits, results)
    if plot is not None:
        from ...bench.plot import save_kernels_plot

        save_kernels_plot(plot, limits, results)
        console.note(f"wrote {plot}")
    end_gathering(console, len(results), total)


def _print(console: Console, limits: Machine, results: Sequence[Result]) -> None:
    peers = list(results[0].peers_us)
    # Beside torch alone, the fastest other is the torch column again.
    rivals = any(not name.startswith("torch") for name in peers)
    columns = [
        "n × k",
        "m",
        "trirun µs",
        "± µs",
        *(f"{name} µs" for name in peers),
        "floor µs",
        "read %",
        "× large",
        "× torch",
    ]
    columns += ["× best"] if rivals else []
    table = []
    for result in results:
        derived = result.derived(limits)
        line = [f"{result.n} × {result.k}", str(result.m), f"{result.us:.1f}", f"{result.spread_us:.1f}"]
        line += [f"{result.peers_us[name]:.1f}" for name in peers]
        share = derived["read_share"]
        line += [f"{result.floor_us:.1f}", "cached" if share is None else f"{share:.0%}"]
        line += [f"{derived['matmul_ratio']:.2f}"]
        fastest = min(result.peers_us.values()) / result.us
        line += [f"{derived['speedup_torch']:.2f}"] + ([f"{fastest:.2f}"] if rivals else [])
        table.append(line)
    first = results[0]
    grid = "per channel" if first.group_size == -1 else f"groups of {first.group_size}"
    sums = "" if first.accumulate == "fp32" else f", sums in {first.accumulate}"
    speed = "the reading speed in the same turns" if limits.device == "cpu" else "the reading speed above"
    console.table(
        f"{limits.name}, torch {limits.torch}: reads {limits.read_gbps:.0f} GB/s, "
        f"torch's large product runs at {limits.matmul_tflops:.3g} TFLOP/s (both measured)\n"
        f"INT2 {grid}, {first.act_bits}-bit activations, {first.dtype}{sums}; medians\n"
        f"floor: reading the weights and nothing else; read %: of {speed}; cached: weights too small for that\n"
        "× large: beside torch's large product, no limit for int8 arithmetic; × best: than the fastest other",
        columns,
        table,
    )
