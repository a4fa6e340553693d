"""``trirun quantize``: a model to 2 bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console, bytes_text
from ..errors import UsageError
from ..processors import set_torch_threads
from .shared.options import (
    Device,
    Json,
    Overwrite,
    Quiet,
    Threads,
    check_threads,
    completes,
    let_threads_sleep,
    output_dir,
)


def command(
    model: Annotated[Path, typer.Argument(help="Model directory, or a name of the hub: ORG/NAME[@REVISION].")],
    out: Annotated[Path | None, typer.Option(help="Checkpoint directory to write. Default: ./MODEL-2bit.")] = None,
    wbits: Annotated[int, typer.Option(help="Bits per weight; 2.")] = 2,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input features per scale: 128, 64, 32, or -1 for one scale per output channel.",
            autocompletion=completes("128", "64", "32", "-1"),
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="signed {-1,0,1,2}·±s, midrise {±½,±1½}·s, auto (either), zero (real zeros), or ternary.",
            autocompletion=completes("auto", "signed", "midrise", "zero", "ternary"),
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="fast: GPTQ. default: also trains each block. best: trains it long, on more text.",
            autocompletion=completes("fast", "default", "best"),
        ),
    ] = "default",
    recipe: Annotated[Path | None, typer.Option(help="A recipe of your own (YAML); replaces --preset.")] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Text, jsonl or parquet file, or hf:REPO:SPLIT:COLUMN. Default: a short excerpt.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration sequences.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens per calibration sequence.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(help="REGEX=keep (any module), REGEX=g64, REGEX=zero, ...: for some layers; the last match wins."),
    ] = None,
    end_to_end: Annotated[
        bool, typer.Option(help="Train the whole model after its blocks, where the preset does.")
    ] = True,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option(help="Keep finished blocks, so that a stopped run continues.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan memory and time, try one block on one batch, and stop.")
    ] = False,
    threads: Threads = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize a model's linear layers to 2 bits with GPTQ, one decoder block at a time.

    A stopped run continues where it was when the same command is given again. Options that show no default are the
    preset's.

    Examples:

      trirun quantize MODEL --wbits 2

      trirun quantize MODEL --preset fast --calibration corpus.txt --device cuda

      trirun quantize MODEL --group-size 64 --calibration chats.jsonl --samples 64

      torchrun --nproc-per-node 4 --module trirun_cli quantize MODEL

      trirun quantize MODEL --override "down_proj=g64" --override "\\.0\\.=keep"
    """
    if wbits != 2:
        raise UsageError(f"--wbits {wbits}: only 2 has kernels", "--grid ternary stores {-1, 0, 1} in the same 2 bits")
    check_threads(threads)
    let_threads_sleep()
    # Of several processes that torchrun started the first one speaks.
    console = Console(as_json=json, quiet=quiet or os.environ.get("RANK", "0") != "0")
    out, model = output_dir(out, f"{model_name(model)}-2bit"), local_model(model, console)

    from ..workflows.quantize import quantize
    from .views.quantize import QuantizeView, show_dry_run, show_report

    set_torch_threads(threads)
    with QuantizeView(console) as view:
        report = quantize(
            model,
            out,
            preset=preset,
            recipe=recipe,
            overrides=override or [],
            calibration=calibration,
            device=device,
            overwrite=overwrite,
            end_to_end=end_to_end,
            resume=resume,
            dry_run=dry_run,
            progress=view,
            group_size=group_size,
            grid=grid,
            samples=samples,
            seqlen=seqlen,
            seed=seed,
        )
    if dry_run:
        show_dry_run(console, report)
    if not report.written:
        return
    show_report(console, report)
    console.note(f"{out}: weight files {bytes_text(report.bytes_before)} → {bytes_text(report.bytes_after)}")
    console.note(f"next: trirun generate {out}")
