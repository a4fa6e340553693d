"""What ``trirun pack`` shows: progress while it works, the report."""

from __future__ import annotations

from trirun_gptq.run.progress import Event, ModuleStarted

from ...console import Console, bytes_text
from ...workflows.pack import PackReport
from .progress import ProgressView


class PackView(ProgressView):
    """One progress bar over all layers, its text naming the current one."""

    title = "packing"

    def __call__(self, event: Event) -> None:
        if isinstance(event, ModuleStarted):
            self.bar.advance() if event.index else self.bar.reset(event.total)
            self.bar.describe(event.name)


def show_report(console: Console, report: PackReport) -> None:
    """Every packed layer: what its scales cover, and its size before and after."""
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
        },
    )
    worst = report.scale_error
    proof = f"codes equal, scales rounded by {worst:.1e} at most" if worst else "each equal to its original bit for bit"
    console.table(
        f"{len(report.modules)} matrices packed, {proof}",
        ("module", "n × k", "scale per", "zeros", "before", "after"),
        [
            (
                module.name,
                f"{module.n} × {module.k}",
                module.structure,
                f"{module.zeros:.1%}",
                bytes_text(module.source_bytes),
                bytes_text(module.packed_bytes),
            )
            for module in report.modules
        ],
    )
