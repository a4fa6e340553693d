"""GGUF in, GGUF out: the blocks of llama.cpp's own files come back byte for byte."""

import shutil

import numpy as np
import pytest
import torch

from tests.checkpoint.formats.gguf_writer import DATA
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

GgufFile = pytest.importorskip("trirun_cli.checkpoint.formats.gguf.file").GgufFile


def raw(file, name):
    stored = file.tensors[name]
    return file.path.read_bytes()[stored.start : stored.start + stored.nbytes]


@pytest.mark.parametrize("name", ["tiny-llama-Q2_0", "tiny-llama-TQ2_0", "tiny-qwen3-Q2_0", "tiny-qwen3-TQ2_0"])
def test_the_blocks_of_a_file_come_back(request, tmp_path, name):
    path = DATA / f"{name}.gguf"
    if not path.is_file():
        path = request.getfixturevalue("shared") / "data" / "formats" / "gguf" / path.name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    pack(path, tmp_path / "T")
    export(tmp_path / "T", tmp_path / "again.gguf", to=f"gguf:{name.rsplit('-', 1)[1]}")
    was, again = GgufFile(path), GgufFile(tmp_path / "again.gguf")
    packed = [tensor for tensor, stored in again.tensors.items() if stored.type.quantized]
    assert set(packed) == {tensor for tensor, stored in was.tensors.items() if stored.type.quantized}
    assert set(was.tensors) == set(again.tensors)
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


def test_a_file_of_another_program_becomes_one_of_a_third(trirun, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export(packed, tmp_path / "f.gguf", to="gguf:Q2_0", pre="gpt-2")
    code, _, err = trirun("export", tmp_path / "f.gguf", "--to", "mlx", "--out", tmp_path / "M")
    assert code == 0 and "once" in err, err
    pack(tmp_path / "M", tmp_path / "T")
    was, again = Checkpoint(packed), Checkpoint(tmp_path / "T")
    assert all(torch.equal(was.packed(module).words, again.packed(module).words) for module in was.modules)


def test_a_directory_of_rotated_weights_is_refused_by_every_command(trirun, plain_model, tmp_path):
    shutil.copytree(plain_model, tmp_path / "rotated")
    (tmp_path / "rotated" / "hadamard.json").write_text("{}")
    for command in (("pack",), ("generate", "-p", "x", "-c"), ("export", "--to", "mlx", "-c"), ("eval", "-m")):
        code, out, err = trirun(*command, tmp_path / "rotated")
        assert code == 3 and out == "" and "its weights are rotated (hadamard.json)" in " ".join(err.split()), command
