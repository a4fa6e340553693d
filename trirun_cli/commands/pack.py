"""``trirun pack``: a model that is ternary or 2-bit already, losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console, bytes_text
from ..processors import set_torch_threads
from .shared.options import ACT_BITS, Json, Overwrite, Quiet, Threads, check_threads, completes, output_dir


def command(
    model: Annotated[
        Path,
        typer.Argument(
            help="Model whose linear weights are ternary floats, or packed by another program: a directory, a GGUF "
            "file, or the hub's ORG/NAME[@REVISION][:FILE]."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Checkpoint directory to write. Default: ./MODEL-packed.")] = None,
    keep: Annotated[str | None, typer.Option(help="Regular expression of modules to leave as they are.")] = None,
    act_bits: Annotated[
        int | None,
        typer.Option(
            help="Activation bits: 8 for a model trained with such, or 16. Default: 8 for BitNet's format.",
            autocompletion=completes(*map(str, ACT_BITS)),
        ),
    ] = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for every matrix, not for every kind.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pack a model that is ternary or of 2 bits already, bit for bit.

    Finds one scale per tensor, row, or 128/64/32 columns from the data, and proves for every matrix that the packed
    form decodes to the original. A weight that is not ternary is an error that names it; nothing is written then.

    Models of 2 bits that are packed already keep their codes: MLX, compressed-tensors, GPTQ (both versions), AutoRound,
    Humming, BitNet. A scale that fp16 does not hold is rounded, and the error shown.

    A GGUF file of ternary or 2-bit types needs nothing beside it: config, tokenizer and chat template are in it. Its
    embedding and head become 16-bit, and so do layers of other types that are not ternary. Of a hub repository with
    several, the 2-bit or ternary one is taken, and named; :FILE, a name or a type, chooses another.

    Examples:

      trirun pack TriLM_1.1B_Unpacked --out trilm-1.1b

      trirun pack bitnet-b1.58-2B-4T

      trirun pack Ternary-Bonsai-8B-PQ2_0.gguf --out bonsai-8b

      trirun pack prism-ml/Ternary-Bonsai-8B-gguf

      trirun pack prism-ml/Ternary-Bonsai-8B-gguf:Q2_0_g64

      trirun pack Ternary-Bonsai-8B-mlx-2bit
    """
    check_threads(threads)
    console = Console(as_json=json, quiet=quiet)
    out, model = output_dir(out, f"{model_name(model)}-packed"), local_model(model, console)
    console.note(f"packing {model} into {out}")

    from ..workflows.pack import pack
    from .views.pack import PackView, show_report

    set_torch_threads(threads)
    with PackView(console) as view:
        report = pack(model, out, keep=keep, activation_bits=act_bits, overwrite=overwrite, progress=view)
    show_report(console, report, verbose=verbose)
    console.note(f"{out}: weight files {bytes_text(report.bytes_before)} → {bytes_text(report.bytes_after)}")
    console.note(f"next: trirun generate {out}")
