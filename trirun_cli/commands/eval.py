"""``trirun eval``: how good a model is, and how close a checkpoint stays to its original."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..console import Console
from ..errors import CheckFailed, UsageError
from ..processors import set_torch_threads
from ..workflows.import_cache import as_model_dir
from .shared.checkpoint_options import CheckpointArgument, CheckpointOption, Verify, one_checkpoint
from .shared.options import (
    ActBits,
    Device,
    DType,
    Head,
    Json,
    KvCacheDType,
    Quiet,
    Threads,
    check_machine,
    check_output,
    let_threads_sleep,
)

_MACHINE, _LONG, _OUTPUT = "Machine", "Long runs", "Output"

# Options of the tasks that need no lm-eval; lm-eval's tasks have all but --text and --window.
_OF_TEXTS = {
    "perplexity": {"--text", "--window"},
    "kl": {"--text", "--window"},
    "wikitext2": {"--window", "--data-dir"},
}


def _uses(task: str, option: str) -> bool:
    return option in _OF_TEXTS[task] if task in _OF_TEXTS else option not in ("--text", "--window")


def _task_names(incomplete: str) -> list[str]:
    """What TAB offers after the last comma: tasks that need no search through lm-eval's files."""
    from ..eval.settings import BUILT_IN
    from ..eval.tasks.offline import OFFLINE_TASKS

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in ("list", *BUILT_IN, "mmlu", *OFFLINE_TASKS) if name.startswith(last)]


def command(
    checkpoint: CheckpointArgument = None,
    checkpoint_option: CheckpointOption = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="The original, unquantized model; with a checkpoint, both.")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            "-t",
            help="Comma-separated: perplexity, wikitext2, kl, any task of lm-eval (mmlu, piqa, ...); list shows all.",
            autocompletion=_task_names,
        ),
    ] = "perplexity",
    data_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Local files of the tasks instead of the hub: a folder or a file. Repeatable."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text for perplexity and kl. Default: a held-out excerpt.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens per window. Default: 2048 or the model's context.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N windows, or questions of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples in each prompt. Default: the task's own (MMLU's papers use 5).")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put prompts into the tokenizer's chat template.")
    ] = False,
    max_ratio: Annotated[
        float | None, typer.Option(help="Fail (exit 6) when checkpoint / model perplexity exceeds this.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder for finished requests; name it again to continue.", rich_help_panel=_LONG),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences per batch. Default: found by itself.", rich_help_panel=_LONG)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of examples and sampling. Default: lm-eval's seeds.", rich_help_panel=_LONG)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables as markdown to FILE.", rich_help_panel=_OUTPUT)
    ] = None,
    log_samples: Annotated[
        Path | None, typer.Option(help="Write each question's prompt and scores below DIR.", rich_help_panel=_OUTPUT)
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            help="Most tokens that the model sees at once. Default: its own, past its sliding window.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: KvCacheDType = "auto",
    head: Head = "auto",
    as_served: Annotated[
        bool,
        typer.Option(
            "--as-served",
            help="With the engine's own shortcuts (8-bit head, 16-bit cache), as generate runs the checkpoint.",
            rich_help_panel=_MACHINE,
        ),
    ] = False,
    verify: Verify = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity, divergence from the original, and accuracy on lm-eval's tasks.

    [b]perplexity[/b]: non-overlapping windows of --text, as in the GPTQ paper. [b]wikitext2[/b]: the same of
    WikiText-2's raw test split, the number that papers give (lm-eval's [b]wikitext[/b] is another one: per word).
    [b]kl[/b]: divergence and top-1 agreement between --checkpoint and --model.

    Examples:

      trirun eval DIR --model ORIGINAL

      trirun eval DIR --tasks mmlu,piqa --data-dir mmlu --data-dir piqa.jsonl

      trirun eval --tasks list
    """
    wanted = tuple(dict.fromkeys(task.strip() for task in tasks.split(",") if task.strip()))
    if not wanted:
        raise UsageError(f"--tasks {tasks!r}: names no task")
    if "list" in wanted:
        return _list_tasks(Console(as_json=json, quiet=quiet), data_dir or ())
    check_machine(dtype, act_bits, kv_cache_dtype=kv_cache_dtype, threads=threads, context=ctx, head=head)
    if checkpoint is not None or checkpoint_option is not None:
        checkpoint = one_checkpoint(checkpoint, checkpoint_option)
    least_values = {"window": (window, 2), "limit": (limit, 1), "batch-size": (batch_size, 1)}
    for option, (value, least) in (least_values | {"num-fewshot": (num_fewshot, 0)}).items():
        if value is not None and value < least:
            raise UsageError(f"--{option} {value}: at least {least}")
    if window is not None and ctx is not None and window > ctx:
        raise UsageError(f"--window {window}: more than --ctx {ctx}")
    if max_ratio is not None and not max_ratio > 0:
        raise UsageError(f"--max-ratio {max_ratio}: more than 0")
    if checkpoint is None and model is None:
        raise UsageError("give --checkpoint DIR, --model DIR, or both")
    if checkpoint is None or model is None:
        if max_ratio is not None:
            raise UsageError("--max-ratio compares --checkpoint with --model; give both")
        if "kl" in wanted:
            raise UsageError("--tasks kl compares --checkpoint with --model; give both")
    if max_ratio is not None and not {"perplexity", "wikitext2"} & set(wanted):
        raise UsageError("--max-ratio bounds a perplexity; add perplexity or wikitext2 to --tasks")
    # Options that no task of --tasks uses.
    chosen = {
        "--text": text,
        "--window": window,
        "--data-dir": data_dir or None,
        "--num-fewshot": num_fewshot,
        "--chat-template": chat_template or None,
        "--seed": seed,
        "--batch-size": batch_size,
    }
    for option, setting in chosen.items():
        if setting is not None and not any(_uses(task, option) for task in wanted):
            raise UsageError(f"{option}: no task of --tasks {tasks} uses it")
    for directory in data_dir or ():
        if not directory.exists():
            raise UsageError(f"--data-dir {directory}: no such file or directory")
    check_output("--markdown", markdown)
    check_output("--log-samples", log_samples, folder=True)
    let_threads_sleep()
    console = Console(as_json=json, quiet=quiet)

    from ..eval.report import SCHEMA, Report, write_text
    from ..eval.session import run
    from ..eval.settings import Settings
    from ..eval.tables import markdown as as_markdown
    from ..eval.tables import tables

    set_torch_threads(threads)
    settings = Settings(
        wanted,
        text,
        window,
        limit,
        num_fewshot,
        tuple(data_dir or ()),
        chat_template,
        seed,
        batch_size,
        device,
        dtype,
        act_bits,
        kv_cache_dtype,
        head,
        as_served,
        resume,
        threads,
        ctx,
    )
    named = (("model", model), ("checkpoint", checkpoint))
    roles = [
        (role, as_model_dir(path, console, verify=verify and (role == "checkpoint" or checkpoint is None)))
        for role, path in named
        if path is not None
    ]
    report = Report(run(settings, roles, console))
    console.json(SCHEMA, report.document())
    for table in tables(report):
        console.table(table.title, table.columns, table.brief)
        if table.detail:
            console.note(f"{len(table.detail)} more rows in --json and --markdown")
    try:
        if markdown is not None:
            write_text(markdown, as_markdown(report))
    finally:
        if log_samples is not None:
            report.write_samples(log_samples)
    for name, (ratio, _) in report.ratios.items():
        if max_ratio is not None and ratio > max_ratio:
            raise CheckFailed(f"{name} ratio {ratio:.4f} is above --max-ratio {max_ratio}")


def _list_tasks(console: Console, directories: Sequence[Path]) -> None:
    """Print what --tasks can name, and where the data of each come from."""
    from dataclasses import asdict
    from textwrap import fill

    from ..eval.tasks.listing import task_groups

    for directory in directories:
        if not directory.exists():
            raise UsageError(f"--data-dir {directory}: no such file or directory")
    groups = task_groups(directories)
    console.json("eval.tasks/1", {"groups": [asdict(group) for group in groups]})
    for group in groups:
        if group.families:
            shown = [f"{folder} ({count})" for folder, count in group.families]
            what = f"{len(group.names)} tasks and groups, by lm-eval's folders; --json has every name"
        else:
            shown, what = list(group.names), ""
        console.text(f"{group.title}: data from {group.data}" + (f"; {what}" if what else ""))
        console.text(fill(", ".join(shown) or "none", 100, initial_indent="  ", subsequent_indent="  ") + "\n")
    if not groups[-1].names:
        console.note("lm-eval is not installed, which all but the built-in tasks need: pip install 'trirun[eval]'")
