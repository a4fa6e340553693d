"""``trirun generate``: text from a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import Console
from ..errors import InputError, UsageError
from ..workflows.import_cache import as_model_dir
from .shared.checkpoint_options import CheckpointArgument, CheckpointOption, OriginalOption, Verify, one_checkpoint
from .shared.generation_options import (
    Choices,
    Context,
    GrammarFile,
    JsonSchema,
    MinP,
    Regex,
    RepetitionPenalty,
    Seed,
    Stats,
    Stop,
    Temperature,
    TopK,
    TopP,
    answer_facts,
    answer_speed,
    asked_grammar,
    sampling_params,
)
from .shared.options import (
    Accumulate,
    ActBits,
    Compile,
    Device,
    DType,
    Engine,
    Head,
    Json,
    KvCacheDType,
    Quiet,
    Tf32,
    Threads,
    check_machine,
)

_MANY = "Many prompts"
_BATCH = 16


def command(
    checkpoint: CheckpointArgument = None,
    checkpoint_option: CheckpointOption = None,
    original: OriginalOption = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from a file; - is standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 128,
    stop: Stop = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. Default: when there is one.")
    ] = None,
    stats: Stats = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choices = None,
    grammar: GrammarFile = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help='A prompt per line; in .jsonl, {"prompt": ..., "max_tokens": ...}.', rich_help_panel=_MANY),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSONL file for the answers. Default: standard output.", rich_help_panel=_MANY)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue --out where it was interrupted.", rich_help_panel=_MANY)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out if it is there.", rich_help_panel=_MANY)
    ] = False,
    batch: Annotated[
        int | None, typer.Option(help=f"Prompts that run at once. Default: {_BATCH}.", rich_help_panel=_MANY)
    ] = None,
    context: Context = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: KvCacheDType = "auto",
    head: Head = "auto",
    accumulate: Accumulate = "fp32",
    engine: Engine = "auto",
    tf32: Tf32 = False,
    compiled: Compile = False,
    verify: Verify = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt, streaming to the terminal; or a whole file of prompts, many at once.

    Without a prompt it asks for one, or reads standard input when that is a pipe. Ctrl-C ends with the text so far.

    Examples:

      trirun generate DIR --prompt "Once upon a time"

      trirun generate DIR -f story.txt --temperature 0.8 --top-p 0.95 --seed 1

      echo "The sea was" | trirun generate DIR --max-tokens 64 --stats

      trirun generate DIR --prompt "A person:" --json-schema person.json

      trirun generate DIR --prompts-file prompts.jsonl --out answers.jsonl
    """
    check_machine(dtype, act_bits, engine, accumulate, kv_cache_dtype, context, threads, head)
    console = Console(as_json=json, quiet=quiet)
    checkpoint = as_model_dir(one_checkpoint(checkpoint, checkpoint_option, original), console, verify=verify)
    params = sampling_params(
        checkpoint,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    asked = asked_grammar(json_schema, regex, choice, grammar)
    machine: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "act_bits": act_bits,
        "engine": engine,
        "context": context,
        "accumulate": accumulate,
        "kv_cache_dtype": kv_cache_dtype,
        "head": head,
        "tf32": tf32,
        "compiled": compiled,
        "threads": threads,
    }
    if prompts_file is not None:
        if prompt is not None or prompt_file is not None:
            raise UsageError("--prompts-file and a single prompt are both given; one is enough")
        from .views.prompts_file import generate_many

        return generate_many(
            console,
            checkpoint,
            prompts_file,
            params,
            chat=chat,
            stats=stats,
            machine=machine,
            out=out,
            batch=_BATCH if batch is None else batch,
            resume=resume,
            overwrite=overwrite,
            grammar=asked,
        )
    if out is not None or resume or overwrite or batch is not None:
        raise UsageError("--out, --resume, --overwrite and --batch belong to --prompts-file")

    from ..backends.registry import open_runner
    from ..engine.engine import Engine as RunningEngine
    from ..engine.generation import stop_ids
    from ..engine.request import FinishReason, Request
    from ..text.completion import Prompt, complete, interruptions
    from ..text.detokenizer import encode_prompt, quick_tokenizer
    from ..text.grammar import compile_grammar

    text = _read_prompt(prompt, prompt_file)
    tokenizer = quick_tokenizer(checkpoint, chat=chat is not False)
    use_chat = bool(tokenizer.chat_template) if chat is None else chat
    ids = encode_prompt(tokenizer, text, chat=use_chat)
    ends = stop_ids(checkpoint)
    model = RunningEngine(open_runner(checkpoint, slots=1, **machine))
    constraint = compile_grammar(asked, tokenizer, model.vocab_size, ends)
    # Before the prompt is shown as the beginning of a result.
    model.check(Request("0", tuple(ids), params))
    console.note(f"{checkpoint} on {model.description}")
    if not use_chat:
        console.text(text, end="")
    try:
        with interruptions() as interrupted:
            (done,) = complete(
                model,
                tokenizer,
                [Prompt("0", ids, params, constraint)],
                ends,
                on_text=lambda _, piece: console.text(piece, end=""),
                interrupted=interrupted,
            )
    finally:
        console.text("")
    console.json("generate/1", {"prompt": text, "text": done.text, **answer_facts(done), "engine": model.name})
    if stats:
        console.note(answer_speed(done))
    if done.finish_reason == FinishReason.ABORT:
        raise KeyboardInterrupt


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file are both given; one is enough")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        return typer.prompt("Prompt", err=True)
    try:
        if prompt_file is None or str(prompt_file) == "-":
            return sys.stdin.read().rstrip("\n")
        return prompt_file.read_text(encoding="utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{prompt_file or 'standard input'} is not UTF-8 text: {error}") from error
