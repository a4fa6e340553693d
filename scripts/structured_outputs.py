"""Structured output by JSON schemas: which schemas are compiled, refused or held wrongly, and what a mask takes.

    python scripts/structured_outputs.py MODEL schemas.jsonl.gz [--end 2] [--peer] [--json]

MODEL is a directory with a tokenizer.json, or a GGUF file; --end is the token that ends a text. The schemas are lines
of {"name", "schema", "tests": [{"valid", "data"}]} (the form of JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868).
Every instance is written as JSON, tokenized, and followed token by token: a valid one that is cut off, or an invalid
one that is let through, is wrong. --peer does the same with xgrammar, where it is installed. Each library runs in a
process of its own; its memory is what that process took at most beyond what it had before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from trirun_cli.engine.constraint import Constraint, Grammar, mask_words
from trirun_cli.errors import UsageError
from trirun_cli.text.grammar import GrammarCompiler

Begin = Callable[[], Constraint]


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of the tokenizers library of a model directory or a GGUF file."""
    from tokenizers import Tokenizer

    if path.is_dir():
        source = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    else:
        from trirun_cli.checkpoint.formats.gguf.header import Header
        from trirun_cli.checkpoint.formats.gguf.tokenizer import tokenizer_files

        # Files of a vocabulary alone hold no tensors.
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
            metadata = Header(mapped, path).metadata
            config = {"vocab_size": len(metadata["tokenizer.ggml.tokens"]), "max_position_embeddings": 0}
            source = tokenizer_files(metadata, config)["tokenizer.json"]
    return Tokenizer.from_str(json.dumps(without_space_before(source)))


def without_space_before(source: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that puts no space before a text, as Llama's does: instances begin with their first brace."""

    def stripped(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        for name in ("normalizers", "pretokenizers"):
            if name in part:
                kept = [stripped(each) for each in part[name] if each.get("type") != "Prepend"]
                return part | {name: kept}
        if part.get("type") == "Prepend":
            return None
        return part | {"prepend_scheme": "never"} if part.get("type") == "Metaspace" else part

    return source | {name: stripped(source.get(name)) for name in ("normalizer", "pre_tokenizer")}


def read_schemas(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, gzipped or not."""
    data = path.read_bytes()
    yield from map(json.loads, (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines())


class XGrammarText(Constraint):
    """A text that xgrammar follows."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        import xgrammar

        self._matcher, self._bitmask = matcher, xgrammar.allocate_token_bitmask(1, vocab)

    def fill(self, words: np.ndarray) -> None:
        """See :class:`Constraint`."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        words[:] = self._bitmask[0].numpy().view(np.uint32)

    def advance(self, token: int) -> None:
        """See :class:`Constraint`."""
        self._matcher.accept_token(token)


def xgrammar_compiler(backend: Any, end: int) -> Callable[[Any], Begin]:
    """A function that compiles a schema with xgrammar."""
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    vocab = backend.get_vocab_size()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_schema(schema: Any) -> Begin:
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False)
        except Exception as error:
            raise UsageError(str(error)) from error
        return lambda: XGrammarText(xgrammar.GrammarMatcher(compiled), vocab)

    return compile_schema


def trirun_compiler(backend: Any, end: int) -> Callable[[Any], Begin]:
    """A function that compiles a schema as trirun does, with llguidance."""
    compiler = GrammarCompiler(backend, backend.get_vocab_size(), {end})
    return lambda schema: compiler.compile(Grammar.of_schema(schema))


COMPILERS = {"trirun": trirun_compiler, "xgrammar": xgrammar_compiler}


def peak_mb() -> float:
    """The most memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, model: Path, end: int, schemas: Path) -> dict[str, Any]:
    """What one library does with all schemas."""
    backend = read_tokenizer(model)
    if name == "xgrammar":
        import xgrammar  # noqa: F401, its imports are not its grammars'
    before = peak_mb()
    started = time.perf_counter()
    compile_schema = COMPILERS[name](backend, end)
    compile_schema({"type": "object"})
    prepared = time.perf_counter() - started
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    compiling, masking, wrong = [], [], []
    words = np.zeros(mask_words(backend.get_vocab_size()), np.uint32)
    for line in read_schemas(schemas):
        counts["schemas"] += 1
        started = time.perf_counter()
        try:
            begin = compile_schema(line["schema"])
        except UsageError as error:
            counts["refused"] += 1
            reasons[str(error)[:60]] += 1
            continue
        compiling.append(time.perf_counter() - started)
        counts["compiled"] += 1
        held = True
        for test in line["tests"]:
            counts["instances"] += 1
            text = json.dumps(test["data"], ensure_ascii=False)
            constraint, passes = begin(), True
            for token in [*backend.encode(text, add_special_tokens=False).ids, end]:
                started = time.perf_counter()
                constraint.fill(words)
                masking.append(time.perf_counter() - started)
                if not words[token // 32] >> (token % 32) & 1:
                    passes = False
                    break
                constraint.advance(token)
            if passes != test["valid"]:
                held = False
                wrong.append(f"{line['name']}: {'invalid, let through' if passes else 'valid, cut off'}")
                counts["let through" if passes else "cut off"] += 1
        counts["wrong"] += not held
    return {
        "library": name,
        "vocabulary": backend.get_vocab_size(),
        "prepared_ms": prepared * 1e3,
        **{
            key: counts[key]
            for key in ("schemas", "compiled", "refused", "wrong", "instances", "let through", "cut off")
        },
        "compile_ms": spread(compiling),
        "mask_us": spread(masking, 1e6),
        "masks": len(masking),
        "memory_mb": peak_mb() - before,
        "refusals": dict(reasons.most_common(12)),
        "examples": wrong[:12],
    }


def spread(seconds: list[float], scale: float = 1e3) -> dict[str, float]:
    """Median, 99th percentile and most of some times."""
    cuts = quantiles(seconds, n=100)
    return {"p50": cuts[49] * scale, "p99": cuts[98] * scale, "most": max(seconds) * scale}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--end", type=int, default=0, help="id of the token that ends a text")
    parser.add_argument("--peer", action="store_true", help="the same with xgrammar")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    names = ["trirun", "xgrammar"] if options.peer else ["trirun"]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        found = [pool.submit(measure, name, options.model, options.end, options.schemas).result() for name in names]
    if options.json:
        print(json.dumps({"vocabulary": found[0]["vocabulary"], "libraries": found}, indent=2))
        return
    for row in found:
        compiled, masks = row["compile_ms"], row["mask_us"]
        lines = (
            f"{row['library']}, {row['vocabulary']} tokens: of {row['schemas']} schemas",
            f"{row['compiled']} compiled, {row['refused']} refused, {row['wrong']} held wrongly;",
            f"of {row['instances']} instances {row['let through']} let through, {row['cut off']} cut off;",
            f"compiling {compiled['p50']:.1f} ms (p99 {compiled['p99']:.1f}, most {compiled['most']:.1f});",
            f"a mask {masks['p50']:.0f} us (p99 {masks['p99']:.0f}, most {masks['most']:.0f}) of {row['masks']};",
            f"{row['memory_mb']:.0f} MiB",
        )
        print(" ".join(lines))


if __name__ == "__main__":
    main()
