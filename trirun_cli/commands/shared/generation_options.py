"""Options of the commands that write text, and what they amount to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import InputError, UsageError

if TYPE_CHECKING:
    from ...engine.constraint import Grammar
    from ...engine.sampling import SamplingParams
    from ...text.completion import Completion

_SAMPLING = "Sampling"

Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. Default: the model's generation_config, else 0.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens; 0 is all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(help="Leave out tokens less likely than this share of the likeliest.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: make tokens seen before less likely.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
_STRUCTURED = "Structured output"
JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", help="A file: the text follows this JSON schema.", rich_help_panel=_STRUCTURED),
]
Regex = Annotated[
    str | None, typer.Option("--regex", help="The text matches this expression.", rich_help_panel=_STRUCTURED)
]
Choices = Annotated[
    list[str] | None,
    typer.Option("--choice", help="The text is this or another --choice.", rich_help_panel=_STRUCTURED),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", help="A file: the text follows this Lark or GBNF grammar.", rich_help_panel=_STRUCTURED),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print speed at the end, on standard error.")]
Context = Annotated[
    int | None,
    typer.Option("--ctx", help="Most tokens of prompt and answer. Default: the model's.", rich_help_panel="Machine"),
]


def sampling_params(
    checkpoint: Path,
    *,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """What options say, or else the model's generation_config.json where it samples, or else greedy.

    Raises:
        UsageError: an option's value is out of range. InputError: one of the model's is.
    """
    from ...engine.generation import sampling_defaults
    from ...engine.sampling import SamplingParams

    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    defaults = sampling_defaults(checkpoint)
    chosen = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    known: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    try:
        return SamplingParams(max_tokens=max_tokens, seed=seed, stop=tuple(stop or ()), **known)
    except UsageError as error:
        name, _, rest = str(error).partition(" ")
        if name in given and given[name] is None:
            raise InputError(f"{checkpoint / 'generation_config.json'}: {error}") from None
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from None


def asked_grammar(
    schema: Path | None, regex: str | None, choices: list[str] | None, grammar: Path | None
) -> Grammar | None:
    """What options say that the text must be.

    Raises:
        UsageError: two of them are given, or a choice is empty. InputError: a file is not readable, or no JSON schema.
    """
    import json

    from ...engine.constraint import Grammar

    given = [
        name
        for name, value in (("json-schema", schema), ("regex", regex), ("choice", choices), ("grammar", grammar))
        if value
    ]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are both given; one is enough")
    try:
        if schema is not None:
            return Grammar.of_schema(json.loads(schema.read_text(encoding="utf-8")))
        if grammar is not None:
            return Grammar("grammar", grammar.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{schema or grammar} is not UTF-8 text: {error}") from error
    except (ValueError, UsageError, RecursionError) as error:
        raise InputError(f"{schema}: {error}") from error
    if regex:
        return Grammar("regex", regex)
    return Grammar.of_choices(choices) if choices else None


def answer_facts(done: Completion) -> dict[str, Any]:
    """What --json says of one answer besides its text."""
    usage = done.usage
    return {
        "finish_reason": done.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "reused_tokens": usage.reused_tokens,
        "generated_tokens": len(done.token_ids),
        "time_to_first_token_s": usage.first_token_s,
        "decode_tokens_per_s": usage.decode_tokens_per_s,
    }


def answer_speed(done: Completion) -> str:
    """What --stats says of one answer."""
    usage = done.usage
    reused = f" ({usage.reused_tokens} reused)" if usage.reused_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt tokens{reused}, first token after {usage.first_token_s * 1e3:.0f} ms; "
        f"{len(done.token_ids)} generated, {usage.decode_tokens_per_s:.1f} tokens/s"
    )
