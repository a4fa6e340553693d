"""``trirun generate --prompts-file``: a file of prompts as one continuous batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...console import Console
from ...errors import InputError, TrirunError, UsageError

if TYPE_CHECKING:
    from ...engine.constraint import Grammar
    from ...engine.sampling import SamplingParams
    from ...text.completion import Completion

# What of the machine changes no answer, or what a run may have to be continued without.
_SAME_ANSWERS = ("device", "compiled", "threads")


def generate_many(
    console: Console,
    checkpoint: Path,
    prompts_file: Path,
    params: SamplingParams,
    *,
    chat: bool | None,
    stats: bool,
    machine: dict[str, Any],
    out: Path | None,
    batch: int,
    resume: bool,
    overwrite: bool,
    grammar: Grammar | None = None,
) -> None:
    """Answer every prompt of a file; the prompt of index i is sampled with seed + i, unless its line has a seed. What a
    line says of its sampling goes before ``params``. Every answer follows ``grammar``.

    Raises:
        TrirunError: prompts were refused; the others are answered, and each refusal stands in place of its answer.
        KeyboardInterrupt: Ctrl-C, after what was finished has been written.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other")
    if resume and out is None:
        raise UsageError("--resume needs the --out of the run that it continues")
    if overwrite and out is None:
        raise UsageError("--overwrite needs the --out that it replaces")
    if batch < 1:
        raise UsageError(f"--batch {batch}: at least 1")
    from ...backends.registry import open_runner
    from ...engine.engine import Engine
    from ...engine.generation import stop_ids
    from ...engine.request import FinishReason, Request
    from ...text.completion import Prompt, complete, interruptions
    from ...text.detokenizer import encode_prompt, quick_tokenizer, require_chat_template
    from ...text.grammar import compile_grammar
    from ...text.prompt_files import AnswerFile, model_identity, read_prompts

    prompts = read_prompts(prompts_file)
    if not prompts:
        console.warn(f"{prompts_file} holds no prompt")
    if unused := dict.fromkeys(name for line in prompts for name in line.unused):
        console.note(f"{prompts_file}: not used of its lines: {', '.join(unused)}")
    tokenizer = quick_tokenizer(checkpoint, chat=chat is not False)
    use_chat = bool(tokenizer.chat_template) if chat is None else chat
    if use_chat:
        require_chat_template(tokenizer)
    precision = {name: value for name, value in machine.items() if name not in _SAME_ANSWERS}
    settings = {"model": model_identity(checkpoint), "chat": use_chat, **precision, **asdict(params)}
    if grammar is not None:
        settings["grammar"] = asdict(grammar)
    # With --json the answers are part of the one document.
    with closing(AnswerFile(out, settings, resume=resume, overwrite=overwrite, kept_back=console.as_json)) as answers:
        answers.check(prompts)
        open_prompts = [prompt for prompt in prompts if prompt.index not in answers.answers]
        if len(open_prompts) < len(prompts):
            console.note(f"{out}: {len(prompts) - len(open_prompts)} of {len(prompts)} prompts are answered already")
        if not open_prompts:
            answers.settle()
            return _report(console, answers.answers, [], 0.0, out, stats=stats, engine="")

        engine = Engine(open_runner(checkpoint, slots=min(batch, len(open_prompts)), **machine))
        ends = stop_ids(checkpoint)
        constraint = compile_grammar(grammar, tokenizer, engine.vocab_size, ends)
        console.note(f"{checkpoint} on {engine.description}, {engine.slots} prompts at once")
        done: list[Completion] = []
        started, written = time.perf_counter(), 0
        with interruptions() as interrupted, console.progress("prompts", total=len(open_prompts)) as bar:

            def requests() -> Iterator[Prompt]:
                for line in open_prompts:
                    seed = None if params.seed is None else (params.seed + line.index) % 2**64
                    try:
                        ids = encode_prompt(tokenizer, line.text, chat=use_chat)
                        wanted = replace(params, **{"seed": seed} | line.params)
                        prompt = Prompt(str(line.index), ids, wanted, constraint)
                        engine.check(Request(prompt.id, tuple(ids), wanted))
                    except InputError as error:
                        answers.add(line, {"error": str(error)})
                        bar.advance()
                    else:
                        yield prompt

            for completion in complete(engine, tokenizer, requests(), ends, interrupted=interrupted):
                if completion.finish_reason == FinishReason.ABORT:
                    continue
                answers.add(prompts[int(completion.id)], _answer(completion))
                done.append(completion)
                written += len(completion.token_ids)
                bar.advance()
                bar.describe(f"prompts, {written / (time.perf_counter() - started):.0f} tokens/s")
            stopped = interrupted()
    _report(console, answers.answers, done, time.perf_counter() - started, out, stats=stats, engine=engine.name)
    if stopped:
        hint = "; --resume continues" if out is not None else ""
        console.warn(f"interrupted: {len(answers.answers)} of {len(prompts)} prompts are answered{hint}")
        raise KeyboardInterrupt
    failed = sum("error" in answer for answer in answers.answers.values())
    if failed:
        raise TrirunError(f'{failed} of {len(prompts)} prompts were refused; their lines say why, under "error"')


def _answer(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.usage.prompt_tokens,
        "generated_tokens": len(completion.token_ids),
    }


def _report(
    console: Console,
    answers: dict[int, dict[str, Any]],
    done: list,
    seconds: float,
    out: Path | None,
    stats: bool,
    engine: str,
) -> None:
    generated = sum(len(completion.token_ids) for completion in done)
    read = sum(completion.usage.prompt_tokens for completion in done)
    reused = sum(completion.usage.reused_tokens for completion in done)
    first = median([completion.usage.first_token_s for completion in done]) if done else 0.0
    speed = generated / seconds if seconds else 0.0
    document = {
        "answered": len(answers),
        "failed": sum("error" in answer for answer in answers.values()),
        "prompt_tokens": read,
        "reused_prompt_tokens": reused,
        "generated_tokens": generated,
        "seconds": seconds,
        "generated_tokens_per_s": speed,
        "median_time_to_first_token_s": first,
        "engine": engine,
    }
    results = {"out": str(out)} if out else {"answers": [answers[index] for index in sorted(answers)]}
    console.json("generate_many/1", document | results)
    if stats and done:
        console.note(
            f"{len(done)} prompts in {seconds:.1f} s: {read} prompt tokens ({reused} reused), {generated} generated, "
            f"{speed:.1f} tokens/s in all; first token after {first * 1e3:.0f} ms (median, waiting included)"
        )
