"""Structures that hypothesis makes, through every reader of structures: what ``scripts/fuzz.py --structures`` runs."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fuzz_requests import BODIES
from fuzz_seeds import GGUF_LIST, GGUF_METADATA, GGUF_NUMBERS, GGUF_TEXT, NoInput, gguf_bytes, gguf_value
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

Read = Callable[[bytes], None]
_ROUND = 500
_LEAVES = (
    st.none() | st.booleans() | st.integers(-2, 300) | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\ud800", "../x", "a{99999}", "x" * 5000, 10**400])
)  # fmt: skip
JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def changed(draw: st.DrawFn, seeds: list[Any]) -> Any:
    """One of these values, with up to three parts replaced by any JSON, left out, or joined by a new one."""
    whole = [copy.deepcopy(draw(st.sampled_from(seeds)))]
    for _ in range(draw(st.integers(0, 3))):
        holder, key = draw(st.sampled_from(list(_places(whole))))
        kind = draw(st.integers(0, 5))
        if kind == 0 and holder is not whole:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(JSON)
        else:
            holder[key] = draw(JSON)
    return whole[0]


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


_WITHIN = {
    "group_size": st.sampled_from([32, 64, 128, -1]), "grid": st.sampled_from(["signed", "zero", "ternary", "auto"]),
    "keep": st.booleans(),
}  # fmt: skip
RECIPES = st.fixed_dictionaries({}, optional={
    "name": _TEXT, "samples": st.integers(1, 2**31), "seqlen": st.integers(1, 2**20), "seed": st.integers(0, 2**63 - 1),
    "damp": st.floats(0, 1, exclude_min=True), "clip": st.booleans(), "sweeps": st.integers(0, 100),
    "correction": st.floats(0, 1), "refine_steps": st.integers(0, 10**6), "ignore": st.lists(_TEXT, max_size=3),
    "overrides": st.dictionaries(_TEXT, st.fixed_dictionaries({}, optional=_WITHIN), max_size=2),
    **{name: _WITHIN[name] for name in ("group_size", "grid")},
})  # fmt: skip
PROMPTS = st.lists(st.fixed_dictionaries(
    {"prompt": st.text(st.characters(exclude_categories=["Cs"]))},
    optional={
        "id": JSON, "max_tokens": st.integers(0, 2**40), "temperature": st.floats(0, 1e30),
        "seed": st.integers(0, 2**64 - 1), "top_p": st.floats(0, 1, exclude_min=True), "note": JSON,
        "stop": st.lists(_TEXT.filter(bool), max_size=3),
    },
), max_size=4)  # fmt: skip


def _number(kind: int) -> st.SearchStrategy[Any]:
    letter = GGUF_NUMBERS[kind]
    if letter in "fd":
        return st.floats(width=32 if letter == "f" else 64)
    if letter == "?":
        return st.booleans()
    bits = 8 * len(gguf_value(kind, 0))
    return st.integers(0, 2**bits - 1) if letter.isupper() else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_SCALARS = {kind: _number(kind) for kind in GGUF_NUMBERS} | {GGUF_TEXT: _TEXT}
_LISTS = st.one_of(*(st.tuples(st.just(kind), st.lists(of, max_size=5)) for kind, of in _SCALARS.items()))
VALUES = st.one_of(*(st.tuples(st.just(kind), of) for kind, of in (_SCALARS | {GGUF_LIST: _LISTS}).items()))
METADATA = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), VALUES, max_size=6
)
_KNOWN = st.sampled_from([
    *GGUF_METADATA, "general.alignment", "general.file_type", "llama.rope.freq_base", "llama.rope.scaling.type",
    "llama.rope.scaling.factor", "llama.rope.dimension_count", "llama.expert_count", "llama.vocab_size",
    "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "split.count", "split.no",
])  # fmt: skip
MODELS = st.dictionaries(_KNOWN, VALUES, max_size=3)


def _recipe_comes_back(values: Any, read: Read, folder: Path) -> None:
    from trirun_gptq.errors import QuantizationError
    from trirun_gptq.recipe import Recipe, load_recipe

    try:
        recipe = Recipe.from_dict(values)
    except QuantizationError:
        return
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    assert load_recipe(folder / "recipe.yaml") == recipe


def _prompts_come_back(lines: Any, read: Read, folder: Path) -> None:
    from trirun_cli.text.prompt_files import read_prompts

    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    found = read_prompts(file)
    assert [(line.index, line.text) for line in found] == [(i, line["prompt"]) for i, line in enumerate(lines)]
    for line, given_ in zip(found, lines, strict=True):
        assert json.dumps(line.id) == json.dumps(given_.get("id"))
        for name, value in line.params.items():
            assert (list(value) if name == "stop" else value) == given_[name]


def _metadata_comes_back(metadata: Any, read: Read, folder: Path) -> None:
    from trirun_cli.checkpoint.formats.gguf.header import Header
    from trirun_cli.errors import InputError

    raw: Any = gguf_bytes(metadata)
    try:
        found = Header(raw, folder / "model.gguf").metadata
    except InputError:
        assert "general.alignment" in metadata
        return
    assert list(found) == list(metadata)
    for key, (kind, value) in metadata.items():
        values = value[1] if kind == GGUF_LIST else [value]
        got = list(found[key]) if kind == GGUF_LIST else [found[key]]
        assert len(got) == len(values)
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(got, values, strict=True))


def _changed_model(changes: Any, read: Read, folder: Path) -> None:
    read(gguf_bytes(GGUF_METADATA | changes))


def _dumped(value: Any, read: Read, folder: Path) -> None:
    try:
        raw = json.dumps(value).encode()
    except ValueError:
        return
    read(raw)


# What is made, the target that reads it, and how it is given to that.
PROPERTIES: dict[str, tuple[st.SearchStrategy[Any], str, Callable[[Any, Read, Path], None]]] = {
    **{
        name: (changed([json.loads(raw) for raw in target.seeds]), name, _dumped)
        for name, target in TARGETS.items()
        if target.structured
    },
    "http": (changed([list(body) for body in BODIES]), "http", _dumped),
    "gguf_metadata": (MODELS, "gguf", _changed_model),
    "gguf_round_trip": (METADATA, "gguf", _metadata_comes_back),
    "recipe_round_trip": (RECIPES, "recipe", _recipe_comes_back),
    "prompts_round_trip": (PROMPTS, "prompts", _prompts_come_back),
}


def structures(name: str, examples: int, number: int, folder: Path, outcome: Callable[..., str | None]) -> int:
    """Check one of :data:`PROPERTIES` on structures of hypothesis' making.

    Args:
        examples: how many. number: the seed. folder, outcome: of :mod:`fuzz`.

    Returns:
        how many were read.

    Raises:
        AssertionError, or what else a reader raised: of the smallest structure that it did with, which is printed.
    """
    strategy, target, check = PROPERTIES[name]
    count = 0
    # What the reader imports is no part of a read.
    with contextlib.suppress(Exception):
        TARGETS[target].read(TARGETS[target].seeds[0], folder)

    def read(raw: bytes) -> None:
        try:
            ended = outcome(TARGETS[target], raw, folder)
        except NoInput:
            reject()
        assert not ended, ended

    def check_it(value: Any) -> None:
        nonlocal count
        check(value, read, folder)
        count += 1

    # Hypothesis remembers what it has tried, in memory and time that grow with it.
    for begin in range(0, examples, _ROUND):
        many = settings(
            max_examples=min(_ROUND, examples - begin),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        seed(number + begin)(many(given(strategy)(check_it)))()
    return count
