"""``trirun finetune``: quantization-aware training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console, bytes_text
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
    model: Annotated[Path, typer.Argument(help="The original model: a directory, or a name of the hub.")],
    out: Annotated[Path | None, typer.Option(help="Checkpoint directory to write. Default: ./MODEL-METHOD.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="learned: a scale per group. trilm: one per matrix. bitnet: trilm, int8 activations.",
            autocompletion=completes("learned", "trilm", "bitnet"),
        ),
    ] = "learned",
    recipe: Annotated[Path | None, typer.Option(help="A recipe of your own (YAML); replaces --method.")] = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="gptq, nearest, or a 2-bit checkpoint of this model to heal (learned only).",
            autocompletion=completes("gptq", "nearest"),
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="ternary, signed, midrise or zero (learned only).",
            autocompletion=completes("ternary", "signed", "midrise", "zero"),
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs per scale: 128, 64, 32, or -1 for all.", autocompletion=completes("128", "64", "32", "-1")
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text, jsonl or parquet file, or hf:REPO:SPLIT:COLUMN; repeatable. Default: an excerpt."),
    ] = None,
    generated: Annotated[int | None, typer.Option(help="Sequences the original model writes as further text.")] = None,
    text_share: Annotated[
        float | None, typer.Option(help="Fraction of a batch that is real text, beside those.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes from start to checked checkpoint, in the place of steps.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step, over all devices.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences in memory at a time; 0 is all.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of the weights, in steps of the grid.")] = None,
    rest_lr: Annotated[float | None, typer.Option(help="The same of norms and embeddings; 0 leaves them.")] = None,
    kl: Annotated[float | None, typer.Option(help="Weight of the divergence from the original model.")] = None,
    ce: Annotated[float | None, typer.Option(help="Weight of the cross-entropy with the text.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="auto, bf16, fp16 or fp32.",
            rich_help_panel="Machine",
            autocompletion=completes("auto", "bf16", "fp16", "fp32"),
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option("--gradient-checkpointing", help="Less memory, a third more time.", rich_help_panel="Machine"),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option(help="Fuse with torch.compile. Default: on a GPU.", rich_help_panel="Machine")
    ] = None,
    held_out: Annotated[int | None, typer.Option(help="Sequences that only decide which state is kept.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="Times per run that these are looked at.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice.")] = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option(help="Keep the run's state, so that a stopped run continues.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")] = False,
    threads: Threads = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model on its 2-bit or ternary grid, to predict what the original predicts.

    Makes a model ternary, or heals a 2-bit checkpoint. The state that does best
    on held-out text is packed, checked against the trained weights, and written.

    A stopped run (Ctrl-C) continues when the same command is given again. Options that show no default are the
    method's.

    Several GPUs: accelerate launch -m trirun_cli finetune ...

    Examples:

      trirun finetune MODEL --data corpus.txt

      trirun finetune MODEL --data corpus.txt --generated 24576 --minutes 10

      trirun finetune MODEL --init MODEL-2bit --data corpus.txt --lr 5e-3

      trirun finetune MODEL --method bitnet --data corpus.txt --ce 0.5
    """
    started = time.perf_counter()
    check_threads(threads)
    let_threads_sleep()
    # Of several processes, the first speaks.
    first = os.environ.get("RANK", "0") == "0"
    console = Console(as_json=json and first, quiet=quiet or not first)
    out, model = output_dir(out, f"{model_name(model)}-{method}"), local_model(model, console)
    settings = {
        "init": init,
        "grid": grid,
        "group_size": group_size,
        "generated": generated,
        "text_share": text_share,
        "steps": steps,
        "minutes": minutes,
        "batch": batch,
        "micro_batch": micro_batch,
        "seqlen": seqlen,
        "lr": lr,
        "rest_lr": rest_lr,
        "kl": kl,
        "ce": ce,
        "precision": precision,
        "gradient_checkpointing": gradient_checkpointing,
        "held_out": held_out,
        "evaluations": evaluations,
        "seed": seed,
    }

    from ..workflows.finetune import finetune
    from .views.finetune import FinetuneView, show_dry_run, show_report

    set_torch_threads(threads)
    with FinetuneView(console, started) as view:
        report = finetune(
            model,
            out,
            method=method,
            recipe=recipe,
            data=data or [],
            device=device,
            compiled=compile,
            overwrite=overwrite,
            resume=resume,
            dry_run=dry_run,
            progress=view,
            started=started,
            **settings,
        )
    if dry_run:
        show_dry_run(console, report)
    if not report.written:
        return
    show_report(console, report)
    console.note(f"{out}: weight files {bytes_text(report.bytes_before)} → {bytes_text(report.bytes_after)}")
    console.note(f"next: trirun eval {out} --model {model}")
