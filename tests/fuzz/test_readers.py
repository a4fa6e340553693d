"""Every reader of files that others have made: a result, or one line of an error, whatever they hold."""

from __future__ import annotations

import json
import struct
from copy import deepcopy
from pathlib import Path

import pytest
from fuzz import fuzz
from fuzz_models import CHECKPOINTS
from fuzz_seeds import FORMATS, SIZES, gguf_bytes, safetensors_bytes
from fuzz_targets import TARGETS
from trirun_gptq.errors import QuantizationError, StateError
from trirun_gptq.recipe import Recipe, load_recipe
from trirun_gptq.run.resume import RunState
from trirun_kernels.weights.safetensors_file import TensorFileError, read_header

from trirun_cli.checkpoint import hub
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
from trirun_cli.checkpoint.model_dir import ModelDir, read_json
from trirun_cli.errors import LONGEST_MESSAGE, InputError
from trirun_cli.models.description import description
from trirun_cli.text.prompt_files import read_prompts

CORPUS = Path(__file__).parent / "corpus"
NESTED = "[" * 100_000


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files_end_in_a_result_or_in_one_line(name: str) -> None:
    kept = len(list((CORPUS / name).glob("*")))
    report = fuzz(name, inputs=kept + 100, seconds=60, seed=1, corpus=CORPUS)
    assert report["inputs"] == kept + 100
    assert report["crashes"] == {}


# Of these the first alone is whole: the others begin with what the reader refuses.
ONE = ("names", "answered")


@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_that_fuzzing_starts_from_are_read(name: str, tmp_path: Path) -> None:
    """A seed that is refused leaves everything behind its first check untried."""
    for seed in TARGETS[name].seeds[: 1 if name in ONE else None]:
        TARGETS[name].read(seed, tmp_path)


def test_nesting_is_refused_by_every_reader_of_json(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(NESTED)
    (tmp_path / "deep.jsonl").write_text(NESTED)
    (tmp_path / "state.json").write_text(NESTED)
    with pytest.raises(InputError, match="not valid JSON"):
        read_json(tmp_path / "deep.json")
    with pytest.raises(InputError, match="jsonl:1: not JSON"):
        read_prompts(tmp_path / "deep.jsonl")
    with pytest.raises(StateError, match="is damaged"):
        RunState(tmp_path, {})
    (tmp_path / "deep.yaml").write_text(NESTED)
    with pytest.raises(QuantizationError, match="not valid YAML"):
        load_recipe(tmp_path / "deep.yaml")


def test_aliases_in_a_recipe_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(QuantizationError, match=r"aliases are not read: \*a0"):
        load_recipe(tmp_path / "bomb.yaml")


@pytest.mark.parametrize("values", [{"damp": 10**400}, {"ignore": ["a{99999999999}"]}])
def test_recipes_with_numbers_beyond_all_bounds_are_refused(values: dict) -> None:
    with pytest.raises(QuantizationError):
        Recipe.from_dict(values)


def test_a_header_of_terabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", 10**12))
        opened.truncate(2 * 10**12)  # sparse: no byte of it is stored
    with pytest.raises(TensorFileError, match="its header has 1000000000000 bytes"):
        read_header(file)
    file.write_bytes(safetensors_bytes({"w": ["F16", [0, 2**63]]}))
    with pytest.raises(TensorFileError, match="which no tensor has"):
        read_header(file)


@pytest.mark.parametrize("given", [{"num_hidden_layers": 2**39}, {"model_type": "mixtral", "num_local_experts": 2**39}])
def test_a_config_of_more_layers_or_experts_than_fit_in_memory_is_refused(given: dict) -> None:
    with pytest.raises(InputError, match="above 4096"):
        description({"model_type": "llama", **SIZES, **given})


@pytest.mark.parametrize("wrong", [["U8", [2, 192]], ["F16", [2, 128]]])
def test_scales_of_a_joined_weight_that_are_too_short_are_refused(wrong: list, tmp_path: Path) -> None:
    """Their columns are taken apart by address."""
    whole = deepcopy(CHECKPOINTS[1])
    name = "model.layers.0.self_attn.qkv_proj.weight_scale"
    assert whole["tensors"][name][:2] == ["F16", [2, 192]]
    whole["tensors"][name] = wrong
    with pytest.raises(InputError, match=rf"qkv_proj\.weight_scale is {wrong[0]} .*, the format says F16 \[2, 192\]"):
        TARGETS["decoder"].read(json.dumps(whole).encode(), tmp_path)


def test_a_token_that_would_take_minutes_is_refused(tmp_path: Path) -> None:
    long = b"a" * 6402  # longer, and the file lacks the bytes: refused for its size
    raw = gguf_bytes()
    token = struct.pack("<Q", 2) + b"ab"
    assert raw.count(token) == 1
    (tmp_path / "model.gguf").write_bytes(raw.replace(token, struct.pack("<Q", len(long)) + long))
    with pytest.raises(InputError, match="token of more than"):
        GgufModel(tmp_path / "model.gguf")


def test_messages_are_one_line_that_does_not_speak_to_the_terminal() -> None:
    text = str(InputError("a\nb\x1b[2Jc\ud800" + "x" * 10_000))
    assert text.startswith(r"a b\x1b[2Jc\ud800x")
    assert text.isprintable() and len(text) < LONGEST_MESSAGE + 20


@pytest.mark.parametrize("name", ["../../model.gguf", "/etc/model.gguf", "a/../model.gguf"])
def test_a_hub_listing_that_leaves_the_folder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, *_: object, **__: object) -> object:
            file = type("File", (), {"rfilename": name, "lfs": None})
            return type("Info", (), {"siblings": [file], "sha": "0" * 40})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(InputError, match="which is no file of a model's directory"):
        hub._listing(hub.HubName("a/b"))


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "a/b.safetensors", "", ".."])
def test_an_index_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FORMATS["trirun"]["config"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InputError, match="no file of its directory"):
        ModelDir(tmp_path)


def test_a_weight_file_that_is_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(TensorFileError, match="is missing"):
        read_header(tmp_path / "model.safetensors")
