"""``trirun export``: a checkpoint for another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import model_name
from ..console import Console, bytes_text
from ..processors import set_torch_threads
from ..workflows.import_cache import as_model_dir
from .shared.checkpoint_options import CheckpointOption, PackedArgument, one_checkpoint
from .shared.options import Json, Overwrite, Quiet, Threads, check_threads, completes, output_dir

_FORMATS = (
    *("gguf:Q2_0", "gguf:TQ2_0", "gguf:TQ1_0", "gguf:F16"),
    *("mlx", "compressed-tensors", "bitnet", "dense"),
)


def command(
    to: Annotated[
        str,
        typer.Option(
            help="gguf:Q2_0, gguf:TQ2_0, gguf:TQ1_0, gguf:F16, mlx, compressed-tensors, bitnet or dense.",
            autocompletion=completes(*_FORMATS),
        ),
    ],
    checkpoint: PackedArgument = None,
    checkpoint_option: CheckpointOption = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write, or GGUF file. Default: ./NAME-FORMAT.")] = None,
    pre: Annotated[
        str | None,
        typer.Option(help="GGUF: llama.cpp's name of how the tokenizer splits text, where trirun does not find it."),
    ] = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in the format of another program, every weight with the value it has.

    What the format cannot hold exactly is an error that names tensor, place and values; nothing is written then.
    llama.cpp reads gguf, MLX mlx, vLLM compressed-tensors, transformers bitnet and dense. A model that another program
    packed is packed into the cache first, so that this converts one format into another.

    Examples:

      trirun export T --to gguf:Q2_0

      trirun export T --to mlx --out T-mlx

      trirun export Ternary-Bonsai-8B-PQ2_0.gguf --to gguf:Q2_0
    """
    checkpoint = one_checkpoint(checkpoint, checkpoint_option)
    check_threads(threads)
    console = Console(as_json=json, quiet=quiet)
    target, is_file = to.removeprefix("gguf:"), to.startswith("gguf:")
    out = output_dir(out, f"{model_name(checkpoint)}-{target}" + (".gguf" if is_file else ""))
    checkpoint = as_model_dir(checkpoint, console)
    from ..checkpoint.model_dir import read_config

    # Before torch is imported for one that is not there.
    read_config(checkpoint)
    console.note(f"exporting {checkpoint} to {out}")

    from ..workflows.export import export
    from .views.export import ExportView, show_report

    set_torch_threads(threads)
    with ExportView(console) as view:
        report = export(checkpoint, out, to=to, pre=pre, overwrite=overwrite, progress=view)
    show_report(console, report)
    for note in report.notes:
        console.note(note)
    console.note(f"{out}: weights {bytes_text(report.bytes_before)} → {bytes_text(report.bytes_after)}")
