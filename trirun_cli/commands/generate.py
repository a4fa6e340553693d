"""``trirun generate``: text from a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..console import Console
from ..errors import InputError, UsageError
from .options import ActBits, Device, DType, Engine, Json, Quiet, check_machine


def command(
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", "--model", "-c", help="Packed checkpoint, or an unquantized model.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", help="Read the prompt from a file; - is standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's generation_config, else 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens; 0 is all of them.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. Default: when there is one.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed at the end, on standard error.")] = False,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    engine: Engine = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt, streaming to the terminal.

    Without a prompt it asks for one, or reads standard input when that is a pipe.

    Examples:

      trirun generate --checkpoint DIR --prompt "Once upon a time"

      trirun generate -c DIR -f story.txt --temperature 0.8 --top-p 0.95 --seed 1

      echo "The sea was" | trirun generate -c DIR --max-tokens 64 --stats
    """
    check_machine(dtype, act_bits, engine)
    console = Console(as_json=json, quiet=quiet)

    from ..model_dir import ModelDir
    from ..runtime.generation import GenerationStats, generate_tokens, generation_defaults, stop_ids
    from ..runtime.sampling import SamplingParams
    from ..runtime.text import TextStream, encode_prompt, load_tokenizer

    source = ModelDir(checkpoint)
    defaults = generation_defaults(source)
    sampled = bool(defaults.get("do_sample"))
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(temperature, defaults.get("temperature", 1.0) if sampled else None, 0.0),
        top_k=_first(top_k, defaults.get("top_k") if sampled else None, 0),
        top_p=_first(top_p, defaults.get("top_p") if sampled else None, 1.0),
        seed=seed,
        stop=tuple(stop or ()),
    )
    text = _read_prompt(prompt, prompt_file)
    tokenizer = load_tokenizer(checkpoint)
    use_chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    ids = encode_prompt(tokenizer, text, chat=use_chat)

    from ..runtime.model import open_model

    model = open_model(checkpoint, device=device, dtype=dtype, act_bits=act_bits, engine=engine)
    console.note(f"{checkpoint} on {model.engine}")
    measured = GenerationStats()
    stream = TextStream(tokenizer, ids, params.stop)
    pieces = []

    def show(piece: str) -> None:
        pieces.append(piece)
        console.text(piece, end="")

    if not use_chat:
        console.text(text, end="")
    for token in generate_tokens(model, ids, params, stop_ids(source), measured):
        show(stream.push(token))
        if stream.stopped:
            measured.finish_reason = "stop"
            break
    show(stream.flush())
    console.text("")
    console.json(
        "generate/1",
        {
            "prompt": text,
            "text": "".join(pieces),
            "finish_reason": measured.finish_reason,
            "prompt_tokens": measured.prompt_tokens,
            "generated_tokens": measured.generated_tokens,
            "time_to_first_token_s": measured.first_token_s,
            "decode_tokens_per_s": measured.decode_tokens_per_s,
            "engine": model.engine,
        },
    )
    if stats:
        console.note(
            f"{measured.prompt_tokens} prompt tokens, first token after {measured.first_token_s * 1e3:.0f} ms; "
            f"{measured.generated_tokens} generated, {measured.decode_tokens_per_s:.1f} tokens/s"
        )


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


def _first(*values):
    return next(value for value in values if value is not None)
