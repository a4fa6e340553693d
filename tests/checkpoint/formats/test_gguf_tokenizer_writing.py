"""A tokenizer as GGUF metadata."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from trirun_cli.checkpoint.formats.gguf.file import GgufFile
from trirun_cli.checkpoint.formats.gguf.tokenizer import QWEN2, token_ids, tokenizer_files
from trirun_cli.checkpoint.formats.gguf.tokenizer_metadata import SPLITS, tokenizer_metadata
from trirun_cli.checkpoint.formats.gguf.writer import F32, GgufTensor, write_gguf
from trirun_cli.errors import InputError

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def directory(path, document, **settings):
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def byte_level(pattern, **model):
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    base = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    added = [{"id": id, "content": text, "special": id == 3} | FLAGS for id, text in ((3, "<|end|>"), (4, "<tool>"))]
    pre = {"type": "Sequence", "pretokenizers": steps}
    return {"model": base | model, "pre_tokenizer": pre, "added_tokens": added}


@pytest.mark.parametrize(("pattern", "name"), SPLITS.items())
def test_byte_level_tokens_types_and_special_tokens(tmp_path, pattern, name):
    path = directory(tmp_path, byte_level(pattern), eos_token="<|end|>", chat_template="{{ messages }}")
    found = tokenizer_metadata(path, {"vocab_size": 6})
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == name
    assert found[TOKENS] == ["a", "b", "ab", "<|end|>", "<tool>", "[PAD5]"] and found[TYPES] == [1, 1, 1, 3, 4, 5]
    assert found["tokenizer.ggml.merges"] == ["a b"] and found["tokenizer.ggml.eos_token_id"] == 3
    assert found["tokenizer.chat_template"] == "{{ messages }}" and found["tokenizer.ggml.add_bos_token"] is False


def test_a_tokenizer_without_merges_comes_back(tmp_path):
    """llama.cpp, too, wants the list: it refuses a file of this kind without one."""
    path = directory(tmp_path, byte_level(QWEN2, vocab={"a": 0, "b": 1}, merges=[]), eos_token="<|end|>")
    made = {"general.architecture": "llama"} | tokenizer_metadata(path, {"vocab_size": 5})
    assert made["tokenizer.ggml.merges"] == []
    write_gguf(tmp_path / "m.gguf", made, [GgufTensor("x", (1,), F32, lambda: torch.zeros(1))])
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    config = {"vocab_size": 5, "max_position_embeddings": 8} | token_ids(metadata)
    read = tokenizer_files(metadata, config)["tokenizer.json"]
    assert read["model"]["merges"] == []
    assert Tokenizer.from_str(json.dumps(read)).encode("ab<|end|>").ids == [0, 1, 3]


def test_sentencepiece_scores_order_the_merges(tmp_path):
    vocab = {"<unk>": 0, "<0x00>": 1, "a": 2, "b": 3, "ab": 4, "ba": 5, "abc": 6}
    model = {"type": "BPE", "vocab": vocab, "merges": ["b a", "a b"], "byte_fallback": True, "unk_token": "<unk>"}
    first = [{"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document = {"model": model, "normalizer": {"type": "Prepend", "prepend": "▁"}}
    special = {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}}
    post = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": special}
    document |= {"post_processor": post}
    found = tokenizer_metadata(directory(tmp_path, document), {"vocab_size": 7})
    scores = dict(zip(found[TOKENS], found["tokenizer.ggml.scores"], strict=True))
    assert scores["ba"] > scores["ab"] > scores["abc"] and found[TYPES] == [2, 6, 1, 1, 1, 1, 1]
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.add_space_prefix"] is True


def test_what_llama_cpp_does_not_have_is_refused(tmp_path):
    with pytest.raises(InputError, match="'Unigram' model"):
        tokenizer_metadata(directory(tmp_path, {"model": {"type": "Unigram"}}), {"vocab_size": 5})
    with pytest.raises(InputError, match="splits text by 'x', which has no name"):
        tokenizer_metadata(directory(tmp_path, byte_level("x")), {"vocab_size": 5})
    found = tokenizer_metadata(directory(tmp_path, byte_level("x")), {"vocab_size": 5}, "qwen2")
    assert found["tokenizer.ggml.pre"] == "qwen2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 1}, "do not hold a None model"),
        ({"added_tokens": [1]}, "cannot be read"),
        ({"pre_tokenizer": "x"}, "cannot be read"),
        # A list of that length would take hundreds of gigabytes.
        ({"added_tokens": [{"id": 2**32 - 1, "content": "c", "special": True} | FLAGS]}, "has the id 4294967295"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        tokenizer_metadata(directory(tmp_path, byte_level(QWEN2) | change), {"vocab_size": 5})


def test_settings_that_are_none_are_left_out_or_refused(tmp_path):
    path = directory(tmp_path, byte_level(QWEN2), eos_token=[], chat_template=[1, {"name": "default"}])
    found = tokenizer_metadata(path, {"vocab_size": 5, "bos_token_id": 2**40, "pad_token_id": -1})
    assert not [name for name in found if "token_id" in name or "template" in name]
    with pytest.raises(InputError, match="chat template is not Unicode"):
        tokenizer_metadata(directory(tmp_path, byte_level(QWEN2), chat_template="\ud800"), {"vocab_size": 5})
