"""``trirun pack`` on a model in BitNet's packed format: the same codes, the same model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trirun_kernels import dequantize
from trirun_kernels.weights.names import SCALE, WEIGHT

from tests.small_models import save_ternary
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.integrations.transformers import load


def pack_rows(trits):
    """Row i holds the rows i, i + n/4, i + n/2, i + 3n/4 in two bits each, the value plus one."""
    parts = (trits + 1).to(torch.uint8).chunk(4)
    return sum(part << (2 * i) for i, part in enumerate(parts))


@pytest.fixture
def bitnet(tmp_path, demo_tokenizer):
    """Make a ternary model and a directory of the same in BitNet's format: ``bitnet(stored=..., **section)``."""

    def make(stored=0.125, family="bitnet", **section):
        model, dense, _ = save_ternary(family, {"vocab_size": 8192}, tmp_path)
        tensors = load_file(dense / "model.safetensors")
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name + WEIGHT in tensors and "layers" in name:
                tensors[name + WEIGHT] = pack_rows(tensors[name + WEIGHT].sign())
                tensors[name + SCALE] = torch.tensor([stored])
        directory = tmp_path / "bitnet"
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((dense / "config.json").read_text())
        kind = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
        config["quantization_config"] = kind | {"modules_to_not_convert": ["lm_head"]} | section
        (directory / "config.json").write_text(json.dumps(config))
        for file in demo_tokenizer:
            shutil.copy(file, directory)
        return model, directory

    return make


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stored": 8.0, "linear_class": "bitlinear"},
        # Falcon-E: a Llama, whose config names no class of layers.
        {"stored": 8.0, "linear_class": "bitlinear", "family": "llama"},
    ],
)
def test_the_model_is_the_same(trirun, bitnet, tmp_path, change):
    model, directory = bitnet(**change)
    code, out, _ = trirun("pack", directory, "--out", tmp_path / "T", "--json")
    document = json.loads(out)
    assert code == 0 and document["exact"] and len(document["modules"]) == 14
    packed = Checkpoint(tmp_path / "T")
    assert packed.format.activation_bits == 8 and packed.quant_method == "trirun"
    for name in packed.modules:
        assert torch.equal(dequantize(packed.packed(name), torch.float32), model.get_submodule(name).weight)
    assert trirun("verify", tmp_path / "T", "--against", directory)[0] == 0
    assert trirun("pack", directory, "--out", tmp_path / "T", "--act-bits", "16", "--overwrite")[0] == 0
    tokens = torch.randint(3, 8192, (1, 20))
    with torch.inference_mode():
        want, got = model(tokens).logits, load(tmp_path / "T", device="cpu")(tokens).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3
    assert trirun("generate", "-c", tmp_path / "T", "-p", "The", "-n", "2")[0] == 0


def test_a_scale_that_fp16_rounds_is_said_so(trirun, bitnet, tmp_path):
    _, directory = bitnet(stored=0.1)
    code, out, _ = trirun("pack", directory, "--out", tmp_path / "T")
    assert code == 0 and "scales rounded by" in out and "bit for bit" not in out
    code, out, _ = trirun("verify", tmp_path / "T", "--against", directory)
    assert code == 6 and "differ from the original" in out


@pytest.mark.parametrize(
    ("section", "options", "code", "message"),
    [
        ({"use_rms_norm": True}, (), 3, "norms of their own"),
        ({"quantization_mode": "online"}, (), 3, "latent weights are finite floats"),
        ({"linear_class": "bitlinear"}, (), 3, "the other class is probably meant"),
        ({}, ("--keep", "q_proj"), 2, "cannot be kept"),
    ],
)
def test_what_cannot_be_packed(trirun, bitnet, tmp_path, section, options, code, message):
    _, directory = bitnet(**section)
    got, _, err = trirun("pack", directory, "--out", tmp_path / "T", *options)
    assert got == code and message in err and not (tmp_path / "T").exists()
