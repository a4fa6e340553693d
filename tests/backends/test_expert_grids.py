"""Experts of one layer on several grids, as checkpoints have them that chose matrix by matrix."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from trirun_kernels import QuantSpec

from tests.small_models import FAMILIES, save_ternary
from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.cuda.weights import load_model
from trirun_cli.backends.registry import open_runner
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.integrations.transformers import load
from trirun_cli.models.description import UnsupportedModel

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def packed(tmp_path):
    """A random ternary Mixtral of zero point 1."""
    return save_ternary("mixtral", FAMILIES["mixtral"], tmp_path)[2]


def put_on_grid(directory, module, spec):
    """Give one module of a packed checkpoint another grid: its codes stay, and its scales for groups of any size."""
    file, config = directory / "model.safetensors", directory / "config.json"
    settings, tensors = json.loads(config.read_text()), load_file(file)
    settings["quantization_config"]["overrides"][module] = {"group_size": spec.group_size, "zero": spec.zero}
    scales, k_pad = tensors[f"{module}.weight_scale"][:1], 32 * tensors[f"{module}.weight"].shape[1]
    tensors[f"{module}.weight_scale"] = scales.repeat(1 if spec.group_size < 0 else k_pad // spec.group_size, 1)
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(settings))


def test_the_cpu_runs_experts_of_several_zero_points(packed):
    for module, zero in ((f"{EXPERTS}.2.down", 1.5), (f"{EXPERTS}.0.gate", 1.5), (f"{EXPERTS}.1.up", 2.0)):
        put_on_grid(packed, module, QuantSpec(-1, zero))
    tokens = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = load(packed, device="cpu", dtype=torch.float32)(tokens.unsqueeze(0)).logits[0]
    decoder = NativeDecoder(packed, kv_dtype="float32", int8_head=False, threads=1)
    found = torch.from_numpy(decoder.forward(tokens, keep=60))
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    single = torch.from_numpy(decoder.forward(tokens[59:], position=59))
    assert torch.equal(single[0], found[59])


def test_other_experts_run_through_transformers_which_is_said(packed):
    put_on_grid(packed, f"{EXPERTS}.2.down", QuantSpec(32, 1.0))
    runner = open_runner(packed, device="cpu")
    assert runner.why_slower == f"{EXPERTS} have groups of -1 and 32, and it takes one size"


@pytest.mark.parametrize(("expert", "parts"), [("2.down", "down"), ("0.gate", "gate and up")])
def test_a_gpu_leaves_them_to_transformers_and_says_so(packed, expert, parts):
    put_on_grid(packed, f"{EXPERTS}.{expert}", QuantSpec(-1, 1.5))
    with pytest.raises(UnsupportedModel, match=rf"experts: {parts} are on several grids \(.*1\.0.*1\.5\)"):
        load_model(packed, device=torch.device("cpu"))


def test_a_gpu_runs_downs_on_another_grid_than_gates_and_ups(packed):
    for index in range(4):
        put_on_grid(packed, f"{EXPERTS}.{index}.down", QuantSpec(-1, 1.5))
    mixture = load_model(packed, device=torch.device("cpu")).layers[1].mixture
    assert (mixture.gate_up.spec.zero, mixture.down.spec.zero) == (1.0, 1.5)
    down = Checkpoint(packed).packed(f"{EXPERTS}.3.down")
    assert torch.equal(mixture.down.words[3], down.words)
