"""Tokenizers made of GGUF metadata, beside llama.cpp's tokens."""

import json

import pytest
from tokenizers import Tokenizer

from tests.checkpoint.formats.gguf_writer import DATA, F32, write_gguf
from trirun_cli.checkpoint.formats.gguf.source import GgufModel

EXPECTED = json.loads((DATA / "gguf_expected.json").read_text())


@pytest.mark.parametrize("name", [name for name in EXPECTED["tokens"] if not name.startswith("tiny")])
def test_text_has_llama_cpp_s_tokens(tmp_path, name):
    source = GgufModel(DATA / "tiny-qwen3-TQ2_0.gguf").file
    kinds = {"F32": F32, "TQ2_0": 35}
    stored = {key: (kinds[t.type.name], t.shape, source.raw(key).tobytes()) for key, t in source.tensors.items()}
    model = GgufModel(write_gguf(tmp_path / "m.gguf", dict(source.metadata) | {"tokenizer.ggml.pre": name}, stored))
    compare(model, name)


def test_text_has_llama_cpp_s_tokens_of_sentencepiece():
    compare(GgufModel(DATA / "tiny-llama-Q2_0.gguf"), "tiny-llama-Q2_0")


def compare(model, name):
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    for text, ids in zip(EXPECTED["texts"], EXPECTED["tokens"][name], strict=True):
        found = tokenizer.encode(text).ids
        # Qwen's own tokenizer composes letters first (NFC), which llama.cpp leaves out.
        if name != "qwen2" or text.isascii():
            assert found == ids, text
        if not name.startswith("tiny") and name != "qwen2":
            assert tokenizer.decode(found, skip_special_tokens=False).removeprefix("<|endoftext|>") == text


def test_the_files_beside_the_weights():
    from transformers import AutoTokenizer

    source = GgufModel(DATA / "tiny-qwen3-TQ2_0.gguf")
    assert json.loads((source.path / "generation_config.json").read_text()) == {
        "bos_token_id": 368, "pad_token_id": 368, "eos_token_id": [370]
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert (tokenizer.eos_token, tokenizer.bos_token_id) == ("<|im_end|>", 368)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
