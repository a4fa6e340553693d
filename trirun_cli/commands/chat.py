"""``trirun chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import Console
from ..errors import InputError
from ..workflows.import_cache import as_model_dir
from .shared.checkpoint_options import CheckpointArgument, CheckpointOption, OriginalOption, Verify, one_checkpoint
from .shared.generation_options import (
    Context,
    MinP,
    RepetitionPenalty,
    Seed,
    Stats,
    Stop,
    Temperature,
    TopK,
    TopP,
    answer_facts,
    answer_speed,
    sampling_params,
)
from .shared.options import (
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

if TYPE_CHECKING:
    from ..text.conversation import Conversation

HELP = "/reset forgets the conversation, /system TEXT sets the system message and begins anew, /exit leaves"


def command(
    checkpoint: CheckpointArgument = None,
    checkpoint_option: CheckpointOption = None,
    original: OriginalOption = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")] = 512,
    stop: Stop = None,
    plain: Annotated[
        bool, typer.Option("--plain", help='Without a chat template: a transcript of "User:" and "Assistant:".')
    ] = False,
    stats: Stats = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    context: Context = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: KvCacheDType = "auto",
    head: Head = "auto",
    engine: Engine = "auto",
    tf32: Tf32 = False,
    compiled: Compile = False,
    verify: Verify = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model, through its chat template.

    Ctrl-C stops an answer; /exit or Ctrl-D leaves; /reset forgets, /system TEXT sets the system message, /help tells.
    From a pipe, every line is a message. Of a second turn only what is new is computed.

    Examples:

      trirun chat DIR --system "You are a librarian." --stats

      printf 'Hello\\nTell me more\\n' | trirun chat DIR --json
    """
    check_machine(dtype, act_bits, engine, kv_cache_dtype=kv_cache_dtype, context=context, threads=threads, head=head)
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
    from ..backends.registry import open_runner
    from ..engine.engine import Engine as RunningEngine
    from ..engine.generation import stop_ids
    from ..text.conversation import Conversation
    from ..text.detokenizer import quick_tokenizer

    tokenizer = quick_tokenizer(checkpoint, chat=not plain)
    if not plain and not tokenizer.chat_template:
        raise InputError(
            f"{checkpoint}: the tokenizer has no chat template",
            "trirun generate continues plain text; --plain talks to a model as in a transcript",
        )
    runner = open_runner(
        checkpoint,
        slots=1,
        device=device,
        dtype=dtype,
        act_bits=act_bits,
        kv_cache_dtype=kv_cache_dtype,
        head=head,
        engine=engine,
        context=context,
        threads=threads,
        tf32=tf32,
        compiled=compiled,
    )
    model = RunningEngine(runner)
    ends = stop_ids(checkpoint) | ({tokenizer.eos_token_id} - {None})
    conversation = Conversation(model, tokenizer, params, ends, system=system, plain=plain)
    console.note(f"{checkpoint} on {model.description}; Ctrl-C stops an answer, Ctrl-D leaves, /help tells")
    turns, refused = [], None
    for line in _messages(console):
        if line.startswith("/"):
            if _obey(console, conversation, line) == "exit":
                break
        elif line.strip():
            try:
                turns.append(_answer(console, conversation, line, stats))
            except InputError as error:
                console.error(error)
                refused = error
    first = [{"role": "system", "content": conversation.system}] if conversation.system else []
    console.json("chat/1", {"messages": first + conversation.messages, "turns": turns, "engine": model.name})
    if refused is not None and not sys.stdin.isatty():
        # A person has seen it and gone on; a program that feeds a pipe sees the exit code alone.
        raise typer.Exit(refused.exit_code)


def _messages(console: Console) -> Iterator[str]:
    """What the user says, line by line, until the end of the input."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    ask: Callable[[str], str] = _ask_on_stderr
    if sys.stdout.isatty() and not console.as_json:
        # Importing it gives input() editing and history.
        import readline  # noqa: F401

        ask = input
    while True:
        try:
            yield ask("> ")
        except EOFError:
            console.note("")
            return
        except KeyboardInterrupt:
            console.note("\n/exit or Ctrl-D leaves")


def _ask_on_stderr(prompt: str) -> str:
    """input() writes its prompt to standard output, which here goes to a file or is to be a document."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _obey(console: Console, conversation: Conversation, line: str) -> str:
    """Do what a line that begins with / says; the name of the command."""
    name, _, rest = line[1:].partition(" ")
    if name in ("exit", "quit"):
        return "exit"
    if name == "reset":
        conversation.reset()
        console.note("the conversation is forgotten")
    elif name == "system":
        conversation.system = rest.strip() or None
        conversation.reset()
        console.note(f"system message: {conversation.system or 'none'}; the conversation begins anew")
    elif name == "help":
        console.note(HELP)
    else:
        console.warn(f"/{name} is no command: {HELP}")
    return name


def _answer(console: Console, conversation: Conversation, line: str, stats: bool) -> dict[str, Any]:
    from ..engine.request import FinishReason
    from ..text.completion import interruptions

    with interruptions() as interrupted:
        done, left_out = conversation.answer(line, lambda piece: console.text(piece, end=""), interrupted)
    console.text("")
    if left_out:
        console.note(f"the oldest {left_out} messages no longer fit the context and are left out")
    if stats:
        console.note(answer_speed(done))
    if done.finish_reason == FinishReason.ABORT and not sys.stdin.isatty():
        raise KeyboardInterrupt
    return answer_facts(done)
