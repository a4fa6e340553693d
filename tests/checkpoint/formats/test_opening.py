"""Foreign formats: which directories are of one, and what their config means."""

import gc
import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.formats.gguf_writer import DATA
from trirun_cli.checkpoint.formats import open_foreign, open_source
from trirun_cli.checkpoint.formats.bitnet import divides_by_scale
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.errors import InputError


def directory(path, section):
    save_file(
        {"a.weight": torch.zeros(1, 4, dtype=torch.uint8), "a.weight_scale": torch.ones(1)}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps({} if section is None else {"quantization_config": section}))
    return ModelDir(path)


@pytest.mark.parametrize("section", [None, {"quant_method": "awq"}, {"quant_method": "trirun"}, "bitnet"])
def test_what_is_of_no_format_known_here(tmp_path, section):
    assert open_foreign(directory(tmp_path, section)) is None


def test_bitnet(tmp_path):
    weights = open_foreign(directory(tmp_path, {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}))
    assert weights.kept == {"lm_head"} and weights.activation_bits == 8
    assert torch.equal(weights.dense("a"), -torch.ones(4, 4)) and weights.read("a")[1] == 0


def test_the_convention_of_bitnet_comes_from_the_config(tmp_path):
    assert divides_by_scale({})
    assert divides_by_scale({"linear_class": "bitlinear"})
    assert not divides_by_scale({"linear_class": "autobitlinear"})
    online = {"linear_class": "autobitlinear", "quantization_mode": "online"}
    assert open_foreign(directory(tmp_path, {"quant_method": "bitnet"} | online)).online
    with pytest.raises(InputError, match="linear_class is 'other'"):
        open_foreign(directory(tmp_path, {"quant_method": "bitnet", "linear_class": "other"}))


def test_the_files_made_of_a_gguf_model_go_with_it():
    source = open_source(DATA / "tiny-llama-Q2_0.gguf")
    made = source.path
    assert (made / "config.json").exists()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del source
        gc.collect()
    assert not made.exists() and said == []
