"""Plots of the benchmarks, as PNG files (or SVG, PDF: by the suffix of the name)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingError
from . import f16acc
from .kernels import Machine, Result
from .models import Cell


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        MissingError: it is not; with the command that installs it.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingError("--plot needs matplotlib", "pip install 'trirun[plot]'")


def _pyplot() -> Any:
    """matplotlib's pyplot, which draws into files only."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save_kernels_plot(path: Path, machine: Machine, results: Sequence[Result]) -> None:
    """Plot results of ``bench kernels``: left the roofline, operations per second over operations per byte of weight
    under the measured limits; right the speed-up over torch's dense product, over m.

    Raises:
        OSError: the file cannot be written. MissingError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, (roof, speed) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    shapes = sorted({(result.n, result.k) for result in results})
    for index, (n, k) in enumerate(shapes):
        ours = sorted((r for r in results if (r.n, r.k) == (n, k)), key=lambda r: r.m)
        color = f"C{index % 10}"
        roof.plot(
            [r.flops / r.weight_bytes for r in ours], [r.flops / r.us / 1e6 for r in ours], "o-", color=color,
            label=f"{n} × {k}",
        )  # fmt: skip
        against = [(r.m, r.derived(machine)["speedup_torch"]) for r in ours]
        speed.plot(*zip(*((m, s) for m, s in against if s is not None), strict=True), "o-", color=color)
    intensities = [result.flops / result.weight_bytes for result in results]
    low, high = min(intensities) / 2, max(intensities) * 2
    points = [low * (high / low) ** (i / 200) for i in range(201)]
    limit = [min(point * machine.read_gbps / 1e3, machine.matmul_tflops) for point in points]
    roof.plot(points, limit, "k--", linewidth=1, label="measured: reading; torch's matrix product, no limit for int8")
    roof.set(
        xscale="log", yscale="log", xlabel="operations per byte of weight", ylabel="10¹² operations per second",
        title=f"{machine.name}",
    )  # fmt: skip
    roof.legend(fontsize="small")
    speed.axhline(1, color="k", linewidth=0.8)
    speed.set(xscale="log", xlabel="rows of x (m)", ylabel="times faster than torch's dense product")
    speed.set(title=f"group size {results[0].group_size}, {results[0].act_bits}-bit activations")
    speed.grid(alpha=0.3)
    roof.grid(alpha=0.3)
    _save(figure, path)


def save_model_plot(path: Path, model: str, machine: str, cells: Sequence[Cell]) -> None:
    """Plot results of ``bench model``: tokens per second over the batch, a line per contestant and context.

    Raises:
        as :func:`save_kernels_plot`.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for index, context in enumerate(sorted({cell.context for cell in cells})):
        of_context = sorted((cell for cell in cells if cell.context == context), key=lambda cell: cell.batch)
        for name, style in zip(of_context[0].speeds, ("o-", "s--", "^-", "v--"), strict=False):
            speeds = [(cell.batch, cell.speeds[name]) for cell in of_context]
            points = [(batch, batch / speed.step_s) for batch, speed in speeds if speed is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=f"C{index}", label=f"{name}, context {context}"
                )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel="tokens per second")
    axes.set(title=f"{model}\n{machine}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def save_f16acc_plot(path: Path, title: str, measured: Sequence[f16acc.Speed], found: Sequence[f16acc.Error]) -> None:
    """Plot results of ``bench f16acc``: left, 10^12 operations per second over the size; right, box plots of the errors
    over splits.

    Raises:
        as :func:`save_kernels_plot`.
    """
    pyplot = _pyplot()
    figure, (speed, boxes) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name in dict.fromkeys(s.contestant for s in measured):
        points = [(s.size, s.tflops) for s in measured if s.contestant == name]
        speed.plot(*zip(*points, strict=True), "o-", label=name)
    speed.plot([4096, 4096], f16acc.ORIGINAL_TFLOPS, "k_-", label="gpu_poor (H200)")
    speed.set(xlabel="m = n = k", ylabel="10¹² operations per second", title=f"square products, {title}")
    speed.set_ylim(bottom=0)
    speed.grid(alpha=0.3)
    speed.legend(fontsize="small")

    stats = [
        {"label": _label(e), "whislo": e.low, "q1": e.quarter, "med": e.median, "q3": e.three_quarters,
         "whishi": e.largest}
        for e in found
    ]  # fmt: skip
    boxes.bxp(stats, showfliers=False)
    boxes.plot(range(1, len(found) + 1), [e.rms for e in found], "D", color="C0", markersize=4, label="RMS")
    for splits, largest, rms in f16acc.ORIGINAL_ERRORS:
        places = [i + 1 for i, e in enumerate(found) if e.contestant == "trirun" and e.splits == splits]
        boxes.plot(places, [largest] * len(places), "k_", markersize=12)
        boxes.plot(places, [rms] * len(places), "kD", markersize=4, fillstyle="none")
    boxes.plot([], [], "k_", markersize=12, label="gpu_poor, largest")
    boxes.plot([], [], "kD", markersize=4, fillstyle="none", label="gpu_poor, RMS")
    boxes.set(yscale="log", ylabel="|error| against float64", xlabel="whiskers: 5th percentile and largest")
    boxes.set_title(
        f"one row of [{f16acc.PICTURE_ROWS}, {f16acc.PICTURE_K}] · [{f16acc.PICTURE_K}, {f16acc.PICTURE_N}]"
    )
    pyplot.setp(boxes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    boxes.grid(alpha=0.3)
    boxes.legend(fontsize="small")
    _save(figure, path)


def _label(e: f16acc.Error) -> str:
    if e.contestant != "trirun":
        return e.contestant
    return f"splits = {e.splits}" if e.splits else f"default ({e.chunk})"
