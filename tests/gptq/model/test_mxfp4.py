"""gpt-oss as it is published: experts in MXFP4, dequantized one by one for the quantizer."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import Skeleton, TensorSource
from trirun_gptq.model.mxfp4 import dequantize_mxfp4
from trirun_gptq.run.preflight import require_finite

from tests.gptq.models import Log, calibration, make_model, run

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16, "vocab_size": 8192}
FUSED = ("gate_up_proj", "down_proj")


@pytest.fixture
def directories(tmp_path):
    """A random gpt_oss with experts in MXFP4, and the same one dequantized by transformers' own code."""
    packed, dense = (make_model(tmp_path / name, "GptOss", torch.bfloat16, **EXPERTS) for name in ("packed", "dense"))
    tensors, plain = load_file(packed / "model.safetensors"), load_file(dense / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        for fused in FUSED:
            name = f"model.layers.{layer}.mlp.experts.{fused}"
            experts, k, n = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
            assert plain[name].shape == (experts, k, n)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return packed, dense


def test_every_element_and_scale_is_what_the_specification_says():
    # All sixteen elements, at the smallest scale, at 1 and at the largest.
    blocks = torch.arange(16, dtype=torch.uint8).repeat(3, 1) * 17
    found = dequantize_mxfp4(blocks.view(3, 1, 16), torch.tensor([[0], [127], [252]], dtype=torch.uint8))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    for row, exponent in zip(found.double(), (-127, 0, 125), strict=True):
        assert torch.equal(row, values.repeat_interleave(2) * 2.0**exponent)
    with pytest.raises(QuantizationError, match="no number"):
        dequantize_mxfp4(blocks[:1].view(1, 1, 16), torch.tensor([[255]], dtype=torch.uint8))


def test_experts_are_read_as_transformers_reads_them(directories):
    packed, dense = map(TensorSource, directories)
    for source in (packed, dense):
        Skeleton(source).require_tensors()
    names = [name for name, _ in packed.model.named_parameters() if ".experts." in name]
    assert len(names) == 2 * 4 * 3 * 2
    for name in names:
        assert packed.shape(name) == dense.shape(name) == list(packed.read(name).shape)
        assert torch.equal(packed.read(name), dense.read(name)), name


def test_it_is_quantized_like_the_same_model_dequantized(directories):
    (one, report, _), (other, expected, _) = (run(path, sequences=calibration()) for path in directories)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert report.predictions == expected.predictions and report.kept == expected.kept
    assert not any(name.endswith(("_blocks", "_scales")) for name in one)


def test_damaged_scales_are_found_before_the_first_block(directories):
    packed, _ = directories
    file, name = packed / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(file)
    save_file(tensors | {name: torch.full_like(tensors[name], 255)}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=rf"{name}: {tensors[name].numel()} of {tensors[name].numel()} scales"):
        require_finite(TensorSource(packed), Log())
    save_file({key: value for key, value in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"experts\.0\.down\.weight is missing"):
        Skeleton(TensorSource(packed)).require_tensors()
    save_file(tensors | {name: tensors[name][:, :, :1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"experts\.0\.down\.weight: \[4, 64, 3, 16\] in the file"):
        Skeleton(TensorSource(packed)).require_tensors()


def test_commands_take_it(directories, tmp_path, trirun, demo_tokenizer):
    packed, _ = directories
    for file in demo_tokenizer:
        shutil.copy(file, packed)
    text = tmp_path / "text.txt"
    text.write_text("One two three four five six seven. " * 200)
    options = ("--preset", "fast", "--calibration", text, "--samples", 4, "--seqlen", 24, "--group-size", 32)
    code, _, errors = trirun("quantize", packed, *options, "--out", tmp_path / "out")
    assert code == 0, errors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "trirun"
    assert trirun("verify", tmp_path / "out")[0] == 0
    code, _, errors = trirun("generate", tmp_path / "out", "-p", "One", "-n", 4, "--device", "cpu")
    assert code == 0 and "native decoder on cpu" in errors
    code, _, errors = trirun("eval", tmp_path / "out", "--model", packed, "--limit", 2, "--window", 24, "--json")
    assert code == 0, errors
    code, _, errors = trirun("pack", packed, "--out", tmp_path / "packed")
    assert code == 3 and "trirun quantize makes a model 2-bit" in errors
