"""What ``trirun pack`` shows: progress while it works, the report."""

from __future__ import annotations

from collections import defaultdict

from trirun_gptq.run.progress import Event, ModuleStarted

from ...console import Console, bytes_text
from ...workflows.kept import KeptMatrix
from ...workflows.pack import PackedLayer, PackReport
from .progress import ProgressView


class PackView(ProgressView):
    """One progress bar over all layers, its text naming the current one."""

    title = "packing"

    def __call__(self, event: Event) -> None:
        if isinstance(event, ModuleStarted):
            self.bar.advance() if event.index else self.bar.reset(event.total)
            self.bar.describe(event.name)


def show_report(console: Console, report: PackReport, *, verbose: bool = False) -> None:
    """The kinds of layers, or with ``verbose`` every layer: what the scales cover, and the size before and after; below
    it the matrices that stay floats. The JSON document has every layer; with ``--quiet`` nothing is shown."""
    console.json(
        "pack/1",
        {
            "out": str(report.out),
            "exact": report.exact,
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
            "modules": [
                {
                    "name": module.name,
                    "n": module.n,
                    "k": module.k,
                    "group_size": module.spec.group_size,
                    "scale_per": module.structure,
                    "exact": module.exact,
                    "scale_error": module.scale_error,
                    "zero_fraction": round(module.zeros, 4),
                    "bytes_before": module.source_bytes,
                    "bytes_after": module.packed_bytes,
                }
                for module in report.modules
            ],
            "kept": [
                {
                    "name": matrix.name,
                    "shape": list(matrix.shape),
                    "dtype": matrix.dtype,
                    "bytes": matrix.nbytes,
                    "why": matrix.why,
                }
                for matrix in report.kept
            ],
        },
    )
    if console.quiet:
        return
    worst = report.scale_error
    proof = f"codes equal, scales rounded by {worst:.1e} at most" if worst else "each equal to its original bit for bit"
    title = f"{len(report.modules)} matrices packed, {proof}"
    heads = ("n × k", "scale per", "zeros", "before", "after")
    if verbose:
        console.table(title, ("module", *heads), [(module.name, *_row([module])) for module in report.modules])
    else:
        kinds: dict[tuple[str, int, int, str], list[PackedLayer]] = defaultdict(list)
        for module in report.modules:
            kinds[module.name.rsplit(".", 1)[-1], module.n, module.k, module.structure].append(module)
        rows = [(kind[0], str(len(modules)), *_row(modules)) for kind, modules in kinds.items()]
        console.table(title, ("matrices", "number", *heads), rows)
    _show_kept(console, report.kept, verbose)


def _show_kept(console: Console, kept: list[KeptMatrix], verbose: bool) -> None:
    """The matrices that stay floats: how many, of how many bytes, and why."""
    if not kept:
        return
    kinds: dict[tuple[str, str, str, str], list[KeptMatrix]] = defaultdict(list)
    for matrix in kept:
        name = matrix.name if verbose else matrix.name.rsplit(".", 1)[-1]
        kinds[name, " × ".join(map(str, matrix.shape)), matrix.dtype, matrix.why].append(matrix)
    rows = [
        (name, str(len(found)), shape, dtype, bytes_text(sum(matrix.nbytes for matrix in found)), why)
        for (name, shape, dtype, why), found in kinds.items()
    ]
    title = f"kept as floats: {bytes_text(sum(matrix.nbytes for matrix in kept))}"
    console.table(title, ("matrices", "number", "shape", "type", "bytes", "why"), rows)


def _row(modules: list[PackedLayer]) -> tuple[str, str, str, str, str]:
    """What matrices of one kind have in common, and their sums."""
    first = modules[0]
    zeros = sum(module.zeros for module in modules) / len(modules)
    before, after = (sum(sizes) for sizes in zip(*((m.source_bytes, m.packed_bytes) for m in modules), strict=True))
    return f"{first.n} × {first.k}", first.structure, f"{zeros:.1%}", bytes_text(before), bytes_text(after)
