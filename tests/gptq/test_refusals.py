"""What a model is refused for, and that it is named before anything is computed."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import TensorSource

from tests.gptq.models import RECIPE, calibration, make_model, run


def test_defects_are_named(tmp_path):
    make_model(tmp_path / "m")
    with pytest.raises(QuantizationError, match="7 calibration sequences were given; the recipe asks for 6 and 2 held"):
        run(tmp_path / "m", sequences=calibration(7))
    with pytest.raises(QuantizationError, match="sequence 0 has 65 tokens; the model's context ends at 64"):
        run(tmp_path / "m", sequences=[torch.zeros(65, dtype=torch.int64)] * 8)
    with pytest.raises(QuantizationError, match=r"sequence 0 has tokens 3\.\.500; the model's vocabulary is 0\.\.119"):
        run(tmp_path / "m", sequences=[torch.tensor([3, 500])] * 8)
    with pytest.raises(
        QuantizationError, match=r"layers\.0\.self_attn\.q_proj: k=64 is not a multiple of group_size=128"
    ):
        run(tmp_path / "m", replace(RECIPE, group_size=128))
    with pytest.raises(QuantizationError, match=r"has neither model\.safetensors nor"):
        run(tmp_path)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(QuantizationError, match=r"has no config\.json"):
        run(tmp_path / "m")


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "layers.0.input_layernorm", "norm", "embed_tokens"])
def test_broken_weights_are_named(tmp_path, name):
    make_model(tmp_path)
    file, name = tmp_path / "model.safetensors", f"model.{name}.weight"
    tensors = load_file(file)
    tensors[name].view(-1)[7] = float("nan") if "proj" in name else float("-inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(QuantizationError) as caught:
        run(tmp_path)
    assert str(caught.value) == f"{name}: 1 of {tensors[name].numel()} values are NaN or infinite"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(QuantizationError, match=r"model\.safetensors is truncated"):
        run(tmp_path)


@pytest.mark.parametrize("dry_run", [False, True])
def test_all_broken_weights_are_named_before_anything_is_computed(tmp_path, monkeypatch, dry_run):
    make_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5:8] = float("nan")
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = float("inf")
    # Not of the model, and of no consequence.
    tensors["model.rotary.leftover"] = torch.tensor([float("nan")])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    def begun(*_):
        raise AssertionError

    monkeypatch.setattr("trirun_gptq.pipeline._embed", begun)
    with pytest.raises(QuantizationError) as caught:
        run(tmp_path, dry_run=dry_run)
    assert str(caught.value) == (
        "model.layers.0.self_attn.o_proj.weight: 1 of 4096 values; "
        "model.layers.1.mlp.up_proj.weight: 3 of 6144 values are NaN or infinite"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_broken_head_is_named_before_the_first_block(tmp_path, dtype):
    make_model(tmp_path, dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"^lm_head\.weight: 1 of 7680 values are NaN or infinite"):
        run(tmp_path, dry_run=True)


def test_weights_that_no_fp16_scale_reaches_are_named(tmp_path):
    make_model(tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] += 1e6
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        QuantizationError, match=r"^model\.layers\.0\.self_attn\.k_proj: a scale of 5e\+05 does not fit"
    ):
        run(tmp_path)


def test_predictions_that_are_not_finite_are_an_error(tmp_path):
    make_model(tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    # Finite itself, and beyond float32 in every logit.
    tensors["model.norm.weight"] *= 3e38
    tensors["lm_head.weight"] *= 1e5
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        QuantizationError, match="are not finite numbers: perplexity nan before quantization, nan after"
    ):
        run(tmp_path)


@pytest.mark.parametrize("dry_run", [False, True])
def test_missing_and_misshapen_tensors_are_named_before_anything_is_computed(tmp_path, monkeypatch, dry_run):
    make_model(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)

    def begun(*_):
        raise AssertionError

    monkeypatch.setattr("trirun_gptq.pipeline._embed", begun)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=rf"tensor {name} is missing"):
        run(tmp_path, dry_run=dry_run)
    save_file(tensors | {name: tensors[name][:80]}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=rf"{name}: \[80, 64\] in the file, \[96, 64\] by config"):
        run(tmp_path, dry_run=dry_run)


def test_damaged_files_are_an_error_of_this_library(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(QuantizationError, match="is no file of its directory"):
        TensorSource(tmp_path)
