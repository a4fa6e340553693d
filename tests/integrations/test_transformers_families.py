"""Decoder families beyond Llama: pack a random ternary model, load it, and get the same logits."""

import pytest
import torch
from trirun_kernels.gemm.linear import Int2Linear

from tests.small_models import save_ternary
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.integrations.transformers import load

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
    model, _, packed = save_ternary(family, FAMILIES[family], tmp_path)
    loaded = load(packed, device="cpu")
    assert sum(isinstance(module, Int2Linear) for module in loaded.modules()) == len(Checkpoint(packed).modules) >= 8
    tokens = torch.randint(3, 96, (1, 20))
    with torch.inference_mode():
        want, got = model(tokens).logits, loaded(tokens).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3
