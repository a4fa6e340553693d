"""Decoder families beyond Llama: pack a random ternary model, load it, and get the same logits."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trirun_kernels.linear import Int2Linear

from tests.gptq.models import SIZES
from trirun_cli.checkpoint import load_checkpoint
from trirun_cli.pack_model import pack_model

SMALL = {**SIZES, "vocab_size": 64}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "bitnet": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_original(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | FAMILIES[family])))
    head = model.get_output_embeddings()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(torch.randint(-1, 2, module.weight.shape) * 2.0**-4)
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                module.bias.normal_()
    model.save_pretrained(tmp_path / "model")
    reports = pack_model(tmp_path / "model", tmp_path / "packed")
    assert all(report.exact for report in reports)
    loaded = load_checkpoint(tmp_path / "packed")
    assert sum(isinstance(module, Int2Linear) for module in loaded.modules()) == len(reports)
    tokens = torch.randint(3, 64, (1, 20))
    with torch.inference_mode():
        want, got = model.eval()(tokens).logits, loaded(tokens).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3
