"""The reader of safetensors directories: what it gives out equals what safetensors wrote; what is damaged is named."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trirun_kernels.arrays import Array
from trirun_kernels.weights.names import EMBEDDING, HEAD, embedding_names, missing_in_a_layer, packed_modules
from trirun_kernels.weights.safetensors_dir import SafetensorsDir
from trirun_kernels.weights.safetensors_file import TensorFileError, UnsupportedDtypeError

NAME = "b.weight"
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


def save(path, tensors=None):
    path.mkdir(exist_ok=True)
    tensors = tensors or {"a": torch.arange(3.0), NAME: torch.arange(6, dtype=torch.int32).view(2, 3)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def save_shards(path, shards):
    """Write ``shards``, file name to tensors, and their index."""
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    where = {name: file for file, tensors in shards.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def change_header(path, change):
    """Rewrite the header of the one file: ``change`` takes and alters its dictionary."""
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def address(array):
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * array.nbytes).from_address(array.address))


def test_tensors_of_every_dtype_are_as_they_were_written(tmp_path):
    tensors = {str(dtype): torch.arange(2, 14).view(3, 4).to(dtype) for dtype in DTYPES}
    tensors |= {"one number": torch.tensor(3.5), "nothing": torch.empty(0, 4, dtype=torch.float16)}
    opened = SafetensorsDir(save(tmp_path, tensors))
    assert opened.names == sorted(tensors) == list(opened) and len(opened) == len(tensors)
    assert opened.files == [tmp_path / "model.safetensors"]
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        found = opened.tensor(name)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert opened[name].shape == tuple(expected.shape) and opened[name].nbytes == expected.nbytes
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_shards_are_one_directory(tmp_path):
    shards = {"x.safetensors": {"b": torch.ones(2)}, "w.safetensors": {"a": torch.zeros(3), "c": torch.ones(1)}}
    opened = SafetensorsDir(save_shards(tmp_path, shards))
    assert opened.names == ["a", "b", "c"] and [file.name for file in opened.files] == [
        "w.safetensors",
        "x.safetensors",
    ]
    assert opened["b"].file.name == "x.safetensors" and torch.equal(opened.tensor("b"), torch.ones(2))
    assert "b" in opened and "d" not in opened
    with pytest.raises(TensorFileError, match="there is no tensor d"):
        opened.tensor("d")


def test_views_hold_the_same_bytes(tmp_path):
    opened = SafetensorsDir(save(tmp_path))
    expected = opened.tensor(NAME)
    mapped = opened.mapped(NAME)
    assert isinstance(mapped, Array) and mapped.dtype == "int32" and mapped.shape == (2, 3)
    assert bytes(address(mapped)) == expected.numpy().tobytes()
    buffer = bytearray(8)
    opened.read_into(NAME, memoryview(buffer), 16)
    assert bytes(buffer) == expected.numpy().tobytes()[16:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_tensors_as_float32(tmp_path, dtype):
    values = torch.randn(5, 3).to(dtype)
    floats = SafetensorsDir(save(tmp_path, {"norm": values})).floats("norm")
    assert floats.dtype == np.float32 and np.array_equal(floats, values.float().numpy())


def test_what_is_written_to_a_tensor_stays_out_of_the_file(tmp_path):
    opened = SafetensorsDir(save(tmp_path))
    opened.tensor("a").fill_(7)
    assert torch.equal(SafetensorsDir(tmp_path).tensor("a"), torch.arange(3.0))


def test_tensors_outlive_the_mapping(tmp_path):
    opened = SafetensorsDir(save(tmp_path))
    tensor, array = opened.tensor("a"), opened.mapped("a")
    opened.release()
    assert torch.equal(tensor, torch.arange(3.0)) and address(array).sum() == tensor.view(torch.uint8).sum()
    assert torch.equal(opened.tensor("a"), tensor)


@pytest.mark.parametrize(("size", "change", "expected"), [(5, None, True), (400_000, None, True), (400_000, -1, False)])
def test_equal(tmp_path, size, change, expected):
    first = torch.randn(size)
    second = first.clone()
    if change is not None:
        second[change] += 1
    opened = SafetensorsDir(
        save(tmp_path, {"a": first, "b": second, "c": first.double(), "d": second[:, None].clone()})
    )
    assert opened.equal("a", "b") == expected
    assert not opened.equal("a", "c") and not opened.equal("a", "d")


def test_dtypes_that_a_view_does_not_have(tmp_path):
    opened = SafetensorsDir(save(tmp_path, {"a": torch.zeros(2).double(), "b": torch.zeros(2)}))
    for view in (opened.mapped, opened.floats, opened.array_dtype):
        with pytest.raises(UnsupportedDtypeError, match="a is F64, not one of F16, BF16, F32, I32"):
            view("a")
    change_header(tmp_path, lambda header: header["b"].update(dtype="F9_E1M7"))
    opened = SafetensorsDir(tmp_path)
    assert opened.tensor("a").dtype == torch.float64
    with pytest.raises(UnsupportedDtypeError, match="b is F9_E1M7"):
        opened.tensor("b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [12, 13]}, "and 1 bytes"),
        ({"data_offsets": [12, 2**50]}, "truncated: it ends inside b.weight"),
        ({"data_offsets": [36, 12]}, r"at \[36, 12\]"),
        ({"data_offsets": None}, "at None"),
        ({"data_offsets": [0, 24]}, "begins at byte"),
        ({"shape": ["a"]}, r"has shape \['a'\]"),
        ({"shape": [True, 3]}, r"has shape \[True, 3\]"),
        ({"shape": [2, 2]}, "and 24 bytes"),
        ({"dtype": None}, "nothing of the dtype"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, change, message):
    save(tmp_path)
    change_header(tmp_path, lambda header: header[NAME].update(change))
    with pytest.raises(TensorFileError, match=message):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda data: data[:4], "truncated or not a safetensors file"),
        (lambda data: data[:-1], "is truncated: it ends inside b.weight"),
        (lambda data: data + b"x", "its tensors end at"),
        (lambda data: data[:8] + b"x" + data[9:], "is not a safetensors file"),
        (lambda data: (2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        (lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000, "is not a safetensors file"),
    ],
)
def test_files_that_are_none(tmp_path, alter, message):
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(alter(file.read_bytes()))
    with pytest.raises(TensorFileError, match=message):
        SafetensorsDir(tmp_path)


def test_a_file_that_is_cut_after_it_was_opened(tmp_path):
    opened, file = SafetensorsDir(save(tmp_path)), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    assert torch.equal(opened.tensor("a"), torch.arange(3.0))
    for view in (opened.tensor, opened.mapped, lambda name: opened.read_into(name, memoryview(bytearray(24)))):
        with pytest.raises(TensorFileError, match=r"is truncated: it ends inside b\.weight"):
            view(NAME)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "..", ".", "", 3])
def test_shards_lie_in_their_directory(tmp_path, file):
    save(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", NAME: file}}))
    with pytest.raises(TensorFileError, match=r"is no file of its directory|no weight_map of file names"):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[" * 100_000])
def test_an_index_that_is_none(tmp_path, content):
    (save(tmp_path) / "model.safetensors.index.json").write_text(content)
    with pytest.raises(TensorFileError, match=r"index\.json (is not valid JSON|has no weight_map)"):
        SafetensorsDir(tmp_path)


def test_an_index_that_is_not_true(tmp_path):
    save_shards(tmp_path, {"x.safetensors": {"a": torch.ones(2)}, "y.safetensors": {"b": torch.ones(2)}})
    save_file({"c": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(TensorFileError, match=r"x\.safetensors does not hold a, which the index says it does"):
        SafetensorsDir(tmp_path)
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"x\.safetensors is missing"):
        SafetensorsDir(tmp_path)


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(TensorFileError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        SafetensorsDir(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(TensorFileError, match=r"pytorch_model\.bin is a pickle"):
        SafetensorsDir(tmp_path)


def test_reading_takes_no_torch(tmp_path):
    save(tmp_path)
    code = (
        "import sys\nfrom trirun_kernels.weights.safetensors_dir import SafetensorsDir\n"
        f"import trirun_kernels.weights.names\nopened = SafetensorsDir({str(tmp_path)!r})\n"
        "opened.mapped('a'), opened.floats('a')\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    ("stored", "tied", "expected"),
    [
        ((EMBEDDING,), True, (EMBEDDING, EMBEDDING)),
        ((HEAD,), True, (HEAD, HEAD)),
        ((HEAD,), False, (EMBEDDING, HEAD)),
        ((EMBEDDING, HEAD), False, (EMBEDDING, HEAD)),
        ((EMBEDDING, HEAD), True, (EMBEDDING, EMBEDDING)),
        ((EMBEDDING, HEAD, "differ"), True, (EMBEDDING, HEAD)),
    ],
)
def test_names_of_embedding_and_head(tmp_path, stored, tied, expected):
    tensors = {name: torch.ones(4, 2) for name in stored}
    if "differ" in tensors:
        tensors[HEAD][3, 1] = 2
    assert embedding_names({"tie_word_embeddings": tied}, SafetensorsDir(save(tmp_path, tensors))) == expected


def test_names_of_layers():
    alike = {f"model.layers.{i}.{name}" for i in range(3) for name in ("q_proj.bias", "input_layernorm.weight")}
    assert missing_in_a_layer(alike, [int] * 3) is None
    assert missing_in_a_layer(alike - {"model.layers.1.q_proj.bias"}, [int] * 3) == "model.layers.1.q_proj.bias"
    assert missing_in_a_layer(alike, [int] * 4) == "model.layers.3.input_layernorm.weight"
    # Layers of another kind hold something else.
    assert missing_in_a_layer(alike - {"model.layers.1.q_proj.bias"}, [int, str, int]) is None
    assert packed_modules(["b.weight_scale", "a.weight_scale", "c.weight", "b.weight"]) == ["a", "b"]
