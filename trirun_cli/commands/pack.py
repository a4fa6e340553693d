"""``trirun pack``: a model that is ternary or 2-bit already, losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console, bytes_text
from .shared.options import Json, Overwrite, Quiet, output_dir


def command(
    model: Annotated[
        Path,
        typer.Argument(help="Model directory whose linear weights are ternary floats, or packed by another program."),
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
    """Pack a model that is ternary or of 2 bits already, bit for bit.

    Finds one scale per tensor, row, or 128/64/32 columns from the data, and proves for every matrix that the packed
    form decodes to the original. A weight that is not ternary is an error that names it; nothing is written then.

    Models of 2 bits that are packed already keep their codes: MLX, compressed-tensors, GPTQ (both versions), AutoRound,
    Humming, BitNet. A scale that fp16 does not hold is rounded, and the error shown.

    Examples:

      trirun pack TriLM_1.1B_Unpacked --out trilm-1.1b

      trirun pack bitnet-b1.58-2B-4T

      trirun pack Ternary-Bonsai-8B-mlx-2bit
    """
    console = Console(as_json=json, quiet=quiet)
    out, model = output_dir(out, f"{model_name(model)}-packed"), local_model(model, console)
    console.note(f"packing {model} into {out}")

    from ..workflows.pack import pack
    from .views.pack import PackView, show_report

    with PackView(console) as view:
        report = pack(model, out, keep=keep, activation_bits=act_bits, overwrite=overwrite, progress=view)
    show_report(console, report)
    console.note(f"{out}: weight files {bytes_text(report.bytes_before)} → {bytes_text(report.bytes_after)}")
    console.note(f"next: trirun generate --checkpoint {out}")
