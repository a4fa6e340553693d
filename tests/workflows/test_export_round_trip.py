"""GGUF in, GGUF out: the blocks of llama.cpp's own files come back byte for byte."""

import numpy as np
import pytest
import torch

from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

GgufFile = pytest.importorskip("trirun_cli.checkpoint.formats.gguf.file").GgufFile


def raw(file, name):
    stored = file.tensors[name]
    return file.path.read_bytes()[stored.start : stored.start + stored.nbytes]


@pytest.mark.parametrize("name", ["tiny-llama-Q2_0", "tiny-llama-TQ2_0", "tiny-qwen3-Q2_0", "tiny-qwen3-TQ2_0"])
def test_the_blocks_of_a_file_come_back(shared, tmp_path, name):
    path = shared / "data" / "formats" / "gguf" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    pack(path, tmp_path / "T")
    export(tmp_path / "T", tmp_path / "again.gguf", to=f"gguf:{name.rsplit('-', 1)[1]}")
    was, again = GgufFile(path), GgufFile(tmp_path / "again.gguf")
    packed = [tensor for tensor, stored in again.tensors.items() if stored.type.quantized]
    assert len(packed) == 14 and {name for name in was.tensors if name.startswith("blk")} <= set(again.tensors)
    for tensor in packed:
        assert raw(was, tensor) == raw(again, tensor), tensor
    for key, value in was.metadata.items():
        if key == "tokenizer.ggml.token_type":
            # Unused tokens come back as normal ones where they have names of their own.
            used = np.asarray(value) != 5
            assert np.array_equal(np.asarray(value)[used], np.asarray(again.metadata[key])[used])
        # Scores come back as an order of merges, not as numbers.
        elif key.startswith("tokenizer") and not key.endswith("scores"):
            assert np.array_equal(np.asarray(value), np.asarray(again.metadata[key])), key


@pytest.mark.parametrize("to", ["gguf:Q2_0", "gguf:F16"])
def test_an_export_packs_to_the_same_checkpoint(packed, tmp_path, to):
    export(packed, tmp_path / "f.gguf", to=to, pre="gpt-2")
    pack(tmp_path / "f.gguf", tmp_path / "T")
    was, again = Checkpoint(packed), Checkpoint(tmp_path / "T")
    assert was.modules == again.modules
    for module in was.modules:
        first, second = was.packed(module), again.packed(module)
        assert torch.equal(first.words, second.words)
