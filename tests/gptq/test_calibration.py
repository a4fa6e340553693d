"""Calibration data: every source gives the same kind of sequences; every defect gives one clear line."""

import json
import logging
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from trirun_gptq.calibration import load
from trirun_gptq.errors import QuantizationError
from trirun_gptq.recipe import Recipe

from trirun_cli.errors import InputError
from trirun_cli.eval.corpus import wikitext2

RECIPE = Recipe(samples=3, held_out=1, seqlen=8)


class Letters:
    """A tokenizer that knows characters: id = code point, 0 begins a text, 1 ends it."""

    eos_token_id = 1
    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, tokenize):
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)


def documents(count=6, length=12):
    return [chr(ord("a") + i) * length for i in range(count)]


def write(tmp_path, name, texts, field="text"):
    path = tmp_path / name
    if name.endswith(".txt"):
        path.write_text("\n<|endoftext|>\n".join(texts))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({field: texts}), path)
    return str(path)


@pytest.mark.parametrize("name", ["c.txt", "c.jsonl", "c.parquet"])
def test_files_are_joined_and_cut_to_length(tmp_path, name):
    sequences = load(write(tmp_path, name, documents()), Letters(), RECIPE)
    assert [tuple(sequence.shape) for sequence in sequences] == [(8,)] * 4
    assert all(sequence.dtype == torch.int64 for sequence in sequences)
    joined = torch.cat(sequences).tolist()
    # Each document: begin, twelve equal letters, end.
    assert joined[0] == 0 and joined[13] == 1 and joined[14] == 0
    assert len(set(joined[1:13])) == 1 and joined[1] != joined[15]


def test_the_seed_decides_the_order(tmp_path):
    path = write(tmp_path, "c.txt", documents(20))
    first, again = load(path, Letters(), RECIPE), load(path, Letters(), RECIPE)
    other = load(path, Letters(), replace(RECIPE, seed=1))
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(torch.stack(first), torch.stack(other))


def test_natural_length_keeps_documents_whole_and_drops_short_ones(tmp_path):
    texts = ["a" * 40, "b" * 10, "c" * 60, "d" * 200, "e" * 33]
    recipe = Recipe(samples=3, held_out=1, seqlen=100, natural_length=True)
    sequences = load(write(tmp_path, "c.jsonl", texts), Letters(), recipe)
    assert sorted(len(sequence) for sequence in sequences) == [35, 42, 62, 100]
    with pytest.raises(QuantizationError, match=r"holds 4 documents of at least 32 tokens \(5 in all\), 9 are needed"):
        load(write(tmp_path, "c.jsonl", texts), Letters(), replace(recipe, samples=8))


def test_a_long_text_without_separators_is_sampled_all_over(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"{i:06d}" for i in range(60_000)))
    sequences = load(str(path), Letters(), replace(RECIPE, seqlen=64))
    assert len(sequences) == 4
    starts = {"".join(map(chr, load(str(path), Letters(), replace(RECIPE, seed=s))[0][1:7])) for s in range(8)}
    assert len(starts) > 2


def test_chats_go_through_the_template(tmp_path):
    chat = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps({"messages": chat}) + "\n") * 4)
    tokenizer = Letters()
    with pytest.raises(QuantizationError, match="has no chat template"):
        load(str(path), tokenizer, RECIPE)
    tokenizer.chat_template = "present"
    assert "".join(map(chr, load(str(path), tokenizer, RECIPE)[0][1:7])) == "<user>"


def test_defects_are_named(tmp_path):
    with pytest.raises(QuantizationError, match=r"c\.txt holds 28 tokens, 4 sequences of 8 need 32"):
        load(write(tmp_path, "c.txt", documents(2)), Letters(), RECIPE)
    with pytest.raises(QuantizationError, match=r"no column text or messages \(found: body\)"):
        load(write(tmp_path, "c.parquet", documents(), "body"), Letters(), RECIPE)
    with pytest.raises(QuantizationError, match=r"c\.jsonl line 1: no field text or messages \(found: body\)"):
        load(write(tmp_path, "c.jsonl", documents(), "body"), Letters(), RECIPE)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n\n{"text": \n')
    with pytest.raises(QuantizationError, match=r"bad\.jsonl line 3: not valid JSON"):
        load(str(bad), Letters(), RECIPE)
    bad.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(QuantizationError, match=r"bad\.jsonl line 2: not UTF-8 text \(byte 13\)"):
        load(str(bad), Letters(), RECIPE)
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"not parquet")
    with pytest.raises(QuantizationError, match="not a readable parquet file"):
        load(str(bad), Letters(), RECIPE)
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(QuantizationError, match=r"not UTF-8 text \(byte 3\)"):
        load(str(bad), Letters(), RECIPE)
    with pytest.raises(QuantizationError, match="no such file"):
        load(str(tmp_path / "none.txt"), Letters(), RECIPE)
    with pytest.raises(QuantizationError, match=r"c4: no such file; a hub dataset is written hf:"):
        load("c4", Letters(), RECIPE)
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(QuantizationError, match=r"must be a \.txt, \.jsonl, \.parquet file or hf:"):
        load(str(tmp_path / "data.csv"), Letters(), RECIPE)
    with pytest.raises(QuantizationError, match=r"written hf:REPO\[@CONFIG\]:SPLIT:COLUMN"):
        load("hf:org/data:train", Letters(), RECIPE)


def test_a_hub_that_fails_is_one_error_and_no_commentary(monkeypatch, caplog):
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    def fail(*_, **__):
        hub_logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        datasets.logging.get_logger("datasets.load").warning("Using the latest cached version")
        raise ConnectionError("Couldn't reach 'org/nope' on the Hub")

    class Rows(list):
        def shuffle(self, **_):
            hub_logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
            return self

    for name in ("huggingface_hub", "datasets"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    before = [logging.getLogger(name).level for name in ("huggingface_hub", "datasets")]
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(QuantizationError, match=r"^hf:org/nope:train:text: Couldn't reach 'org/nope' on the Hub$"):
        load("hf:org/nope:train:text", Letters(), RECIPE)
    with pytest.raises(InputError, match="wikitext2 cannot be loaded from the hub"):
        wikitext2([])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows({"text": text} for text in documents()))
    assert len(load("hf:org/data:train:text", Letters(), RECIPE)) == 4
    assert caplog.text == "" and before == [logging.getLogger(name).level for name in ("huggingface_hub", "datasets")]
