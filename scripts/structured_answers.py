"""Answers under real JSON schemas: whether each that ends is valid, by the package ``jsonschema``.

    python scripts/structured_answers.py CHECKPOINT schemas.jsonl.gz [--schemas 150] [--temperature 1] [--json]

The schemas are those of ``structured_outputs.py``, the first ones that are compiled. A small model seldom ends a text
by itself, so each schema is asked for several times; what is cut off by ``--tokens`` is counted, and is no answer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from structured_outputs import read_schemas

from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.constraint import Grammar
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.generation import stop_ids
from trirun_cli.engine.request import Event, FinishReason, Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.errors import UsageError
from trirun_cli.text.detokenizer import quick_tokenizer
from trirun_cli.text.grammar import GrammarCompiler


def fault_of(text: str, schema: Any) -> str | None:
    """Why a text is no answer to a schema; None where it is one."""
    from jsonschema import validators

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    found = next(iter(kind(schema).iter_errors(value)), None)
    return None if found is None else found.message[:200]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("schemas_file", type=Path)
    parser.add_argument("--schemas", type=int, default=150)
    parser.add_argument("--each", type=int, default=3, help="answers of each schema")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    tokenizer = quick_tokenizer(options.checkpoint)
    engine = Engine(open_runner(options.checkpoint, device="auto", slots=32))
    ends = frozenset(stop_ids(options.checkpoint))
    compiler = GrammarCompiler(tokenizer.backend_tokenizer, engine.vocab_size, ends)
    counts: Counter[str] = Counter()
    schemas: dict[str, Any] = {}
    requests = []
    for line in read_schemas(options.schemas_file):
        try:
            begin = compiler.compile(Grammar.of_schema(line["schema"]))
        except UsageError:
            continue
        schemas[line["name"]] = line["schema"]
        prompt = tuple(tokenizer("A JSON document:\n")["input_ids"])
        for number in range(options.each):
            params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)
            requests.append(Request(f"{line['name']} {number}", prompt, params, ends, begin))
        if len(schemas) == options.schemas:
            break
    tokens: dict[str, list[int]] = {}
    faults: list[str] = []
    answered: set[str] = set()

    def take(event: Event) -> None:
        tokens.setdefault(event.request_id, []).extend(token.id for token in event.tokens)
        if event.finish is None:
            return
        name = event.request_id.rpartition(" ")[0]
        counts[str(event.finish)] += 1
        if event.finish is FinishReason.STOP:
            fault = fault_of(tokenizer.decode(tokens.pop(event.request_id)), schemas[name])
            answered.add(name)
            if fault is not None:
                faults.append(f"{event.request_id}: {fault}")

    for event in engine.generate(requests):
        take(event)
    engine.close()
    found = {"schemas": len(schemas), "answered": len(answered), "requests": len(requests), "ended": dict(counts)}
    found |= {"invalid": len(faults), "faults": faults[:20]}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['answered']} of {found['schemas']} schemas answered;", end=" ")
    print(f"{counts['stop']} of {len(requests)} answers ended, {found['invalid']} of them invalid;", end=" ")
    print(f"{counts['length']} were cut off by --tokens")
    for fault in faults[:20]:
        print(fault)


if __name__ == "__main__":
    main()
