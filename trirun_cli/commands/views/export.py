"""What ``trirun export`` shows: progress while it works, the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from trirun_gptq.run.progress import Event, ModuleStarted

from ...console import Console
from ...workflows.export import ExportReport
from .progress import ProgressView


class ExportView(ProgressView):
    """One progress bar over all layers, its text naming the current one."""

    title = "exporting"

    def __call__(self, event: Event) -> None:
        if isinstance(event, ModuleStarted):
            self.bar.advance() if event.index else self.bar.reset(event.total)
            self.bar.describe(event.name)


def show_report(console: Console, report: ExportReport) -> None:
    """How many layers are stored as what; as JSON, each of them; with ``--quiet``, nothing."""
    console.json(
        "export/1",
        {
            "out": str(report.out),
            "to": report.target,
            "exact": True,
            "bytes_before": report.bytes_before,
            "bytes_after": report.bytes_after,
            "notes": report.notes,
            "modules": [asdict(module) for module in report.modules],
        },
    )
    if console.quiet:
        return
    kinds = Counter(module.stored for module in report.modules)
    console.table(
        f"{len(report.modules)} matrices, each with the values it had",
        ("stored as", "matrices"),
        [(kind, str(count)) for kind, count in kinds.items()],
    )
