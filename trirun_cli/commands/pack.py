"""``trirun pack``: a ternary model, losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console, bytes_text
from ..errors import UsageError
from .shared.options import Json, Overwrite, Quiet, output_dir


def command(
    model: Annotated[
        Path, typer.Argument(help="Model directory whose linear weights are ternary: TriLM (unpacked), BitNet b1.58.")
    ],
    out: Annotated[Path | None, typer.Option(help="Checkpoint directory to write. Default: ./MODEL-packed.")] = None,
    keep: Annotated[str | None, typer.Option(help="Regular expression of linear layers to leave as they are.")] = None,
    act_bits: Annotated[
        int | None,
        typer.Option(help="Activation bits: 8 for a model trained with such, or 16. Default: 8 for BitNet's format."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pack a model that is ternary already, bit for bit.

    Finds one scale per tensor, row, or 128/64/32 columns from the data, and proves for every matrix that the packed
    form decodes to the original. A weight that is not ternary is an error that names it; nothing is written then.
    Of models in BitNet's packed format (quant_method bitnet) the codes are kept, and scales rounded to fp16.

    Examples:

      trirun pack TriLM_1.1B_Unpacked --out trilm-1.1b

      trirun pack bitnet-b1.58-2B-4T
    """
    if act_bits not in (None, 8, 16):
        raise UsageError(f"--act-bits {act_bits}: 8 or 16")
    console = Console(as_json=json, quiet=quiet)
    out, model = output_dir(out, f"{model_name(model)}-packed"), local_model(model, console)
    console.note(f"packing {model} into {out}")
    from ..workflows.pack import pack_model

    with console.progress("packing") as bar:
        started = False

        def on_module(total: int, name: str) -> None:
            nonlocal started
            bar.advance() if started else bar.reset(total)
            started = True
            bar.describe(name)

        reports = pack_model(model, out, keep=keep, activation_bits=act_bits, overwrite=overwrite, on_module=on_module)
    before, after = (sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (model, out))
    console.json(
        "pack/1",
        {
            "out": str(out),
            "exact": all(report.exact for report in reports),
            "bytes_before": before,
            "bytes_after": after,
            "modules": [
                {
                    "name": report.name,
                    "n": report.n,
                    "k": report.k,
                    "group_size": report.spec.group_size,
                    "scale_per": report.structure,
                    "exact": report.exact,
                    "scale_error": report.scale_error,
                    "zero_fraction": round(report.zeros, 4),
                    "bytes_before": report.source_bytes,
                    "bytes_after": report.packed_bytes,
                }
                for report in reports
            ],
        },
    )
    worst = max(report.scale_error for report in reports)
    proof = f"codes equal, scales rounded by {worst:.1e} at most" if worst else "each equal to its original bit for bit"
    console.table(
        f"{len(reports)} matrices packed, {proof}",
        ("module", "n × k", "scale per", "zeros", "before", "after"),
        [
            (
                report.name,
                f"{report.n} × {report.k}",
                report.structure,
                f"{report.zeros:.1%}",
                bytes_text(report.source_bytes),
                bytes_text(report.packed_bytes),
            )
            for report in reports
        ],
    )
    console.note(f"{out}: weight files {bytes_text(before)} → {bytes_text(after)}")
    console.note(f"next: trirun generate --checkpoint {out}")
