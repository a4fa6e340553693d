"""``trirun eval``: how good a model is, and how close a checkpoint stays to its original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import Console
from ..errors import CheckFailed, UsageError
from .options import Device, Json, Quiet

TASKS = ("perplexity",)


def command(
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", "-c", help="Packed checkpoint (or any model directory).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Unquantized model; with --checkpoint, both side by side.")
    ] = None,
    tasks: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(TASKS)}.")] = "perplexity",
    text: Annotated[Path | None, typer.Option(help="UTF-8 text for perplexity. Default: a held-out excerpt.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens per window. Default: 2048 or the model's context.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N windows.")] = None,
    max_ratio: Annotated[
        float | None, typer.Option(help="Fail (exit 6) when checkpoint / model perplexity exceeds this.")
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or auto.", rich_help_panel="Machine")] = "auto",
    act_bits: Annotated[
        int | None, typer.Option(help="Activation bits, 8 or 16. Default: the checkpoint's.", rich_help_panel="Machine")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity: non-overlapping windows of one token stream, as in the GPTQ paper.

    Example: trirun eval --checkpoint DIR --model ORIGINAL --text valid.txt --window 512
    """
    wanted = [task.strip() for task in tasks.split(",") if task.strip()]
    unknown = [task for task in wanted if task not in TASKS]
    if unknown or not wanted:
        raise UsageError(f"--tasks {tasks}: known tasks are {', '.join(TASKS)}")
    if act_bits not in (None, 8, 16):
        raise UsageError(f"--act-bits {act_bits}: 8 or 16")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: at least 1")
    if checkpoint is None and model is None:
        raise UsageError("give --checkpoint DIR, --model DIR, or both")
    if max_ratio is not None and (checkpoint is None or model is None):
        raise UsageError("--max-ratio compares --checkpoint with --model; give both")
    console = Console(as_json=json, quiet=quiet)

    from ..runtime.model import open_model
    from ..runtime.perplexity import cut_windows, perplexity
    from ..runtime.text import load_tokenizer, read_text

    corpus, name = read_text(text)
    results = []
    for role, path in (("model", model), ("checkpoint", checkpoint)):
        if path is None:
            continue
        runner = open_model(path, device=device, dtype=dtype, act_bits=act_bits)
        length = window or min(2048, runner.max_positions)
        tokenizer = load_tokenizer(path)
        windows = cut_windows(tokenizer(corpus, verbose=False)["input_ids"], length, limit)
        console.note(f"{role} {path} on {runner.engine}: {len(windows)} windows of {length} tokens of {name}")
        with console.progress(role, len(windows)) as bar:
            results.append((role, path, runner.engine, perplexity(runner, windows, bar.advance)))
        del runner

    base = next((found.value for role, _, _, found in results if role == "model"), None)
    console.json(
        "eval/1",
        {
            "text": name,
            "results": [
                {
                    "role": role,
                    "path": str(path),
                    "engine": engine,
                    "perplexity": found.value,
                    "nll": found.nll,
                    "nll_stderr": found.stderr,
                    "windows": found.windows,
                    "window": found.window,
                    "tokens": found.tokens,
                    "ratio": None if base is None else found.value / base,
                }
                for role, path, engine, found in results
            ],
        },
    )
    console.table(
        f"perplexity of {name}",
        ("model", "perplexity", "± (1 s.e.)", "ratio", "tokens"),
        [
            (
                path,
                f"{found.value:.3f}",
                f"{found.value * found.stderr:.3f}",
                "" if base is None else f"{found.value / base:.4f}",
                found.tokens,
            )
            for _, path, _, found in results
        ],
    )
    if max_ratio is not None and base is not None and results[-1][3].value / base > max_ratio:
        raise CheckFailed(f"perplexity ratio {results[-1][3].value / base:.4f} is above --max-ratio {max_ratio}")
