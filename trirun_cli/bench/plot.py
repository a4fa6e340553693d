"""The picture of a benchmark: a roofline, and the speed-up over torch for every number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingError
from .kernels import Machine, Result
from .models import Cell


def require_matplotlib() -> None:
    """Raises MissingError, with what to install, where matplotlib is not there."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingError("--plot needs matplotlib", "pip install 'trirun[plot]'")


def save_figure(figure: Any, path: Path) -> None:
    """Write one of matplotlib's figures, in a folder that is made if need be, and forget it.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def save_plot(path: Path, machine: Machine, results: Sequence[Result]) -> None:
    """Write a PNG: left, operations per second over operations per byte of weight, under the measured limits; right,
    speed-up over torch's dense product over m."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    limit = [min(point * machine.read_gbps / 1e3, machine.peak_tflops) for point in points]
    roof.plot(points, limit, "k--", linewidth=1, label="measured: reading, torch's matrix product")
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
    save_figure(figure, path)


def save_model_plot(path: Path, model: str, machine: str, cells: Sequence[Cell]) -> None:
    """Write a PNG: tokens per second over the batch, a line per contestant and context."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for index, context in enumerate(sorted({cell.context for cell in cells})):
        of_context = sorted((cell for cell in cells if cell.context == context), key=lambda cell: cell.batch)
        for name, style in zip(of_context[0].speeds, ("o-", "s--", "^-", "v--"), strict=False):
            rates = [cell.batch / cell.speeds[name].step_s for cell in of_context]
            axes.plot(
                [cell.batch for cell in of_context], rates, style, color=f"C{index}", label=f"{name}, context {context}"
            )
    axes.set(xscale="log", yscale="log", xlabel="sequences at once", ylabel="tokens per second")
    axes.set(title=f"{model}\n{machine}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)
