"""What scripts/fuzz.py feeds of files beside a model's own: data, records, tokenizers to be written into GGUF, names
that the hub lists."""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fuzz_seeds import TOKENIZER, NoInput, mapping, safetensors_bytes, value


def calibration(raw: bytes, folder: Path) -> None:
    """A .jsonl file of calibration texts, whose tokens are its characters."""
    from trirun_gptq.calibration import load_stream

    (folder / "text.jsonl").write_bytes(raw)
    load_stream(str(folder / "text.jsonl"), _Characters(), 0)


class _Characters:
    eos_token_id, bos_token_id, chat_template = 0, None, "of each message its content"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(f"{message['role']}{message['content']}" for message in messages)


def rows(raw: bytes, folder: Path, name: str = "rows.jsonl") -> None:
    """A file of a benchmark's questions, of the kind that its first row is of."""
    from trirun_cli.eval.tasks.offline import MMLU, OFFLINE_TASKS, load_rows

    (folder / name).write_bytes(raw)
    load_rows(folder / name, (*MMLU.schemas, *(schema for task in OFFLINE_TASKS.values() for schema in task.schemas)))


csv_rows = partial(rows, name="rows.csv")
ROWS = [
    {"question": "a", "choices": ["b", "c", "d", "e"], "answer": 1},
    {"query": "Question: a", "choices": ["b", "c"], "gold": 0},
    {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
    {
        "question": {"stem": "a", "choices": [{"text": "b", "label": "A"}, {"text": "c", "label": "B"}]},
        "answerKey": "A",
    },
    {"ctx_a": "a", "ctx_b": "", "activity_label": "b", "endings": ["c", "d", "e", "f"], "label": "3"},
    {"question": "a", "answer": "b #### 1"},
]
CSV = [b'question,A,B,C,D,answer\n"a, b",c,d,e,f,A\n', b"a,b,c,d,e,B\nf,g,h,i,j,C\n"]
TEXTS = [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}]

SUMS = [f"{sha256(b'{}').hexdigest()}  config.json\n".encode()]
RECORD = [f"files:\n  config.json: {sha256(b'{}').hexdigest()}\nseed: 1\n".encode()]


def sums(raw: bytes, folder: Path, name: str = "SHA256SUMS") -> None:
    """A directory's checksums, of its own or in the recipe that it was made by: every file is held against them."""
    from trirun_cli.checkpoint.verify import verify_files

    (folder / "config.json").write_bytes(b"{}")
    (folder / name).write_bytes(raw)
    list(verify_files(folder))


record = partial(sums, name="trirun_recipe.yaml")
GENERATED = safetensors_bytes({"tokens": ["I32", [2, 4], [0]]})


def generated(raw: bytes, folder: Path) -> None:
    """Sequences that a finetuning has sampled before."""
    from trirun_gptq.train.state import TrainState

    (folder / "generated-0.safetensors").write_bytes(raw)
    TrainState(folder, {}).load_generated(0)


_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SETTINGS = {
    "bos_token": "b", "eos_token": {"content": "b"}, "add_bos_token": True,
    "chat_template": [{"name": "default", "template": "x"}],
}  # fmt: skip
_MERGED = TOKENIZER["model"] | {"byte_fallback": True, "unk_token": "a", "merges": ["a b"]}
EXPORTED = [
    {"tokenizer": TOKENIZER | {"pre_tokenizer": _SPLIT}, "tokenizer_config": _SETTINGS, "config": {}},
    {
        "tokenizer": TOKENIZER | {"model": _MERGED, "pre_tokenizer": None}, "tokenizer_config": {"chat_template": "x"},
        "config": {"bos_token_id": 1, "eos_token_id": [1, 2]},
    },
]  # fmt: skip


def exported(raw: bytes, folder: Path) -> None:
    """A directory's tokenizer.json, tokenizer_config.json and config.json as a GGUF file's metadata."""
    from trirun_cli.checkpoint.formats.gguf.tokenizer_metadata import tokenizer_metadata
    from trirun_cli.checkpoint.formats.gguf.writer import write_gguf

    whole = mapping(raw)
    for name in ("tokenizer", "tokenizer_config"):
        (folder / f"{name}.json").write_text(json.dumps(whole.get(name)))
    config = whole.get("config")
    if not isinstance(config, dict):
        raise NoInput
    # The embedding has that many rows, which is checked before.
    write_gguf(folder / "model.gguf", tokenizer_metadata(folder, config | {"vocab_size": 4}), [])


NAMES = [
    ["a-TQ2_0.gguf", "b/a-Q2_0-00001-of-00002.gguf", "b/a-Q2_0-00002-of-00002.gguf", "mmproj.gguf"],
    ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
]


def names(raw: bytes, folder: Path) -> None:
    """Names of files that the hub lists, and which of them are the model."""
    from trirun_cli.checkpoint.hub_files import choose_gguf

    listed = value(raw)
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise NoInput
    for asked in (None, "TQ2_0"):
        choose_gguf(listed, asked, "a/b")
