"""Tokens per second with a grammar beside none, by turns, on a CPU or a GPU.

    python scripts/bench_constrained.py CHECKPOINT [--batch 1,64] [--tokens 128] [--rounds 7] [--json]

Every request generates the same number of tokens, greedily: with a grammar the items of a JSON list of objects, which
never has to end, without one any text. A round is one run of each; what counts is the median of the rounds' ratios,
since a machine's speed changes over minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.constraint import Constraint, Grammar
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.generation import stop_ids
from trirun_cli.engine.request import Event, Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.text.detokenizer import quick_tokenizer
from trirun_cli.text.grammar import GrammarCompiler

# A list that may go on, of objects with text, numbers and choices.
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 10, "maxLength": 60},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "colour": {"enum": ["red", "green", "blue"]},
        },
        "required": ["name", "age", "colour"],
        "additionalProperties": False,
    },
}


def run(engine: Engine, prompt: list[int], batch: int, tokens: int, begin: Callable[[], Constraint] | None) -> float:
    """Tokens per second of one run; prompts are in the cache after the first."""
    made = 0

    def count(event: Event) -> None:
        nonlocal made
        made += len(event.tokens)

    for number in range(batch):
        # Prompts that differ by their last token.
        own = (*prompt, 5 + number)
        engine.submit(Request(str(number), own, SamplingParams(max_tokens=tokens), constraint=begin), count)
    started = time.perf_counter()
    while engine.step():
        pass
    if made != batch * tokens:
        raise SystemExit(f"{made} tokens of {batch} x {tokens}")
    return made / (time.perf_counter() - started)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    tokenizer = quick_tokenizer(options.checkpoint)
    prompt = tokenizer("A list of people:")["input_ids"]
    found = []
    for batch in map(int, options.batch.split(",")):
        engine = Engine(open_runner(options.checkpoint, device=options.device, slots=batch))
        ends = frozenset(stop_ids(options.checkpoint))
        compiler = GrammarCompiler(tokenizer.backend_tokenizer, engine.vocab_size, ends)
        begin = compiler.compile(Grammar.of_schema(SCHEMA))
        ways = {"constrained": begin, "plain": None}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            # The first round warms up; the order alternates.
            for name in list(ways)[:: 1 if number % 2 else -1]:
                speed = run(engine, prompt, batch, options.tokens, ways[name])
                if number:
                    speeds[name].append(speed)
        ratios = [c / p for c, p in zip(speeds["constrained"], speeds["plain"], strict=True)]
        row = {"batch": batch, "engine": engine.name, "vocabulary": engine.vocab_size, "rounds": options.rounds}
        row |= {name: median(values) for name, values in speeds.items()}
        found.append(row | {"ratio": median(ratios), "least": min(ratios), "most": max(ratios)})
        engine.close()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        print(
            f"{row['engine']}, {row['vocabulary']} tokens, {row['batch']} at once: {row['constrained']:.0f} tokens/s "
            f"with a grammar, {row['plain']:.0f} without: {row['ratio']:.3f} ({row['least']:.3f} to {row['most']:.3f})"
        )


if __name__ == "__main__":
    main()
