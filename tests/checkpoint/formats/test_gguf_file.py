"""GGUF files: the places of tensors, and whatever can be wrong with a file."""

import os
import random
import struct
import time
import tracemalloc

import numpy as np
import pytest

from tests.checkpoint.formats.gguf_writer import (
    DATA,
    F32,
    PQ2_0,
    Q2_0,
    fp16,
    fp32,
    header,
    one_tensor,
    padded,
    two_bits,
    write_gguf,
)
from trirun_cli.checkpoint.formats.gguf.file import GgufFile
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
from trirun_cli.errors import InputError

METADATA = {"general.architecture": "llama", "llama.block_count": 2, "a.list": ["one", "two"], "a.flag": True,
            "numbers": np.arange(5, dtype=np.int32), "eps": 1e-5}  # fmt: skip


def small(path, **changes):
    tensors = {"a": fp32(np.arange(6.0).reshape(2, 3)), "b": fp16(np.ones(5)), "c": fp16(np.zeros((2, 40)))}
    return write_gguf(path, METADATA | changes, tensors)


def test_metadata_and_tensors_are_where_they_were_written(tmp_path):
    file = GgufFile(small(tmp_path / "m.gguf"))
    assert file.metadata.architecture == "llama" and file.metadata.count(".block_count") == 2
    assert file.metadata.strings("a.list") == ["one", "two"] and file.metadata.flag("a.flag", False)
    assert file.metadata["numbers"].tolist() == [0, 1, 2, 3, 4] and file.metadata.number("eps") == 1e-5
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"a": (2, 3), "b": (5,), "c": (2, 40)}
    assert file.raw("a").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    file.release()
    assert file.raw("b").view("<f2").tolist() == [1] * 5
    with pytest.raises(InputError, match="no tensor x"):
        file.raw("x")


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ([("a", (4,), F32, 0), ("a", (4,), F32, 32)], "the tensor 'a' twice"),
        ([("a", (4,), F32, 32)], "a begins at byte 32 of the data.* to begin at 0"),
        ([("a", (4,), F32, 0), ("b", (4,), F32, 16)], "b begins at byte 16"),
        ([("a", (4,), F32, 0), ("b", (4,), F32, 0)], "b begins at byte 0 .* to begin at 32"),
        ([("b", (4,), F32, 32), ("a", (4,), F32, 0)], "b begins at byte 32"),
        ([("a", (2**62, 4), F32, 0)], r"shape \[4611686018427387904, 4\], which no"),
        ([("a", (2**32, 2**32), F32, 0)], "which no tensor has"),
        ([("a", (2**63, 2), F32, 0)], "which no tensor has"),
        ([("a", (0,), F32, 0)], r"shape \[0\]"),
        ([("a", (1, 1, 1, 1, 4), F32, 0)], "5 dimensions"),
        ([("a", (), F32, 0)], "0 dimensions"),
        ([("a", (2, 100), Q2_0, 0)], "rows of 100, no multiple of the 64 of Q2_0"),
        ([("a", (4,), F32, 0), ("b", (4,), F32, 32), ("c", (8,), F32, 64)], "truncated: c ends at"),
        ([("a", (2, 256), 10, 0)], "type Q2_K: its values have a scale and a minimum per 16"),
        ([("a", (2, 256), 16, 0)], "type IQ2_XXS: its values come from a codebook"),
        ([("a", (2, 256), 335, 0)], "IQ2_BN is read"),
        ([("a", (2, 256), 9999, 0)], "the unknown type 9999"),
        ([("x" * 65, (4,), F32, 0)], "65 bytes, not 1 to 64"),
        ([("", (4,), F32, 0)], "0 bytes, not 1 to 64"),
        ([], "holds no tensors"),
    ],
)
def test_a_table_that_contradicts_the_file(tmp_path, table, problem):
    path = tmp_path / "m.gguf"
    path.write_bytes(padded(header({}, table)) + bytes(64))
    with pytest.raises(InputError, match=problem):
        GgufFile(path)


def test_what_cannot_be_read_has_a_way_out(tmp_path):
    with pytest.raises(InputError) as error:
        GgufFile(one_tensor(tmp_path / "m.gguf", 10, (1, 256), bytes(84)))
    assert error.value.fix == "dequantize the model to fp16 (or take its original), then: trirun quantize MODEL"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "empty"),
        (b"GG", "truncated or not a GGUF file"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 1, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0), "says it has 9223372036854775808 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 2**63) + bytes(40), "says it has 9223372036854775808 metadata"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**60) + bytes(40), "1152921504606846976 bytes, not 1 to"),
        (header({"a": "x"}, [])[:-2], "inside the value of 'a'"),
        (header({"a": ["x", "y"]}, [])[:-9], "strings of 'a'|string 1 of 'a'"),
        (struct.pack("<4sIQQQ1sIQQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(40), "unknown kind 0|unknown kind 9"),
    ],
)
def test_a_header_that_cannot_be(tmp_path, raw, problem):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=problem):
        GgufFile(path)


@pytest.mark.parametrize("alignment", [0, 3, 2**21, -1.0, "32"])
def test_an_alignment_that_is_none(tmp_path, alignment):
    path = tmp_path / "m.gguf"
    path.write_bytes(padded(header({"general.alignment": alignment}, [("a", (4,), F32, 0)])) + bytes(32))
    with pytest.raises(InputError, match=r"general\.alignment"):
        GgufFile(path)


def test_other_alignments_and_a_last_tensor_without_padding(tmp_path):
    path = tmp_path / "m.gguf"
    raw = padded(header({"general.alignment": 128}, [("a", (5,), F32, 0), ("b", (5,), F32, 128)]), 128)
    path.write_bytes(raw + padded(np.arange(5, dtype="<f4").tobytes(), 128) + np.ones(5, "<f4").tobytes())
    assert GgufFile(path).raw("b").view("<f4").tolist() == [1] * 5


def test_a_file_that_is_missing_or_a_key_twice(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        GgufFile(tmp_path / "m.gguf")
    entry = header({"a": 1}, [])[24:]
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + 2 * entry)
    with pytest.raises(InputError, match="'a' twice"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("last", [True, False])
def test_type_42_is_told_apart_by_its_sizes(tmp_path, group_size, last):
    weight = np.random.default_rng(0).choice([-0.5, 0, 0.5], (64, 256))
    tensors = {"w": two_bits(weight, group_size, Q2_0), "n": fp32(np.ones(4))}
    if last:
        tensors = dict(reversed(tensors.items()))
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert file.tensors["w"].type.block == group_size and len(file.raw("w")) == (36 if group_size == 64 else 34) * 128


def test_sizes_that_do_not_tell_are_refused(tmp_path):
    # 36 and 34 bytes, both padded to 64.
    path = one_tensor(tmp_path / "m.gguf", Q2_0, (1, 128), bytes(36))
    with pytest.raises(InputError, match="blocks of 64 or 128"):
        GgufFile(path)


def test_bytes_after_the_tensors_are_refused(tmp_path):
    path = one_tensor(tmp_path / "m.gguf", PQ2_0, (1, 128), bytes(34))
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(InputError, match="its tensors end at"):
        GgufFile(path)


def test_a_file_cut_at_any_tensor(tmp_path):
    whole = (DATA / "tiny-qwen3-TQ2_0.gguf").read_bytes()
    tensors = list(GgufFile(DATA / "tiny-qwen3-TQ2_0.gguf").tensors.values())
    path = tmp_path / "m.gguf"
    for tensor in tensors:
        for end in (tensor.start, tensor.start + tensor.nbytes - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(InputError, match=f"truncated: {tensor.name} ends at"):
                GgufFile(path)
    path.write_bytes(whole[len(whole) // 2 :] + whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a GGUF file"):
        GgufFile(path)


def mutated(raw, end, chance):
    """The file with some of its first ``end`` bytes changed, cut, doubled or swapped."""
    made = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(end)
        match chance.randrange(6):
            case 0:
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                made[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
            case 2:
                made[at : at + 4] = struct.pack("<I", chance.choice([0, 5, 7, 8, 9, 12, 13, 2**31, 2**32 - 1]))
            case 3:
                del made[at : at + chance.randint(1, 40)]
            case 4:
                made[at:at] = made[at : at + chance.randint(1, 40)]
            case 5:
                made[at : at + 16] = made[at + 16 : at + 32] + made[at : at + 16]
    return bytes(made if chance.randrange(10) else made[: chance.randrange(len(made))])


def test_ten_thousand_damaged_headers(tmp_path):
    path, chance = tmp_path / "m.gguf", random.Random(0)
    raw = small(path).read_bytes()
    refused, slowest = 0, 0.0
    tracemalloc.start()
    # Made anew, the files would take most of the time.
    with path.open("r+b", buffering=0) as writing:
        for _ in range(10_000):
            damaged = mutated(raw, len(raw) - 160, chance)
            writing.truncate(len(damaged))
            os.pwrite(writing.fileno(), damaged, 0)
            started = time.process_time()
            try:
                file = GgufFile(path)
                for name in file.tensors:
                    file.rows(name)
            except InputError:
                refused += 1
            slowest = max(slowest, time.process_time() - started)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 7_000 < refused < 10_000
    # Whatever sizes a header of 600 bytes states.
    assert peak < 2**20 and slowest < 1


def test_damaged_metadata_of_a_model(tmp_path):
    path, chance = tmp_path / "m.gguf", random.Random(1)
    raw = (DATA / "tiny-qwen3-TQ2_0.gguf").read_bytes()
    tracemalloc.start()
    for _ in range(300):
        # The metadata of the model, and those of the tokenizer up to its special tokens.
        path.write_bytes(mutated(raw, chance.choice([1100, 9792]), chance))
        try:
            GgufModel(path)
        except InputError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23
