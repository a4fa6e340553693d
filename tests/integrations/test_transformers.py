"""Checkpoints through transformers itself: loads once registered, refuses loudly otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trirun_kernels.gemm.linear import Int2Linear

from trirun_cli.errors import InputError
from trirun_cli.integrations.transformers import load
from trirun_cli.workflows.pack import pack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tokens():
    return torch.arange(1, 30).unsqueeze(0)


def test_logits_equal_the_original(packed, ternary_model, tokens):
    original = AutoModelForCausalLM.from_pretrained(ternary_model, dtype=torch.float32)
    model = load(packed, device="cpu")
    assert sum(isinstance(module, Int2Linear) for module in model.modules()) == 14
    with torch.inference_mode():
        want, got = original(tokens).logits, model(tokens).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3


def test_save_pretrained_round_trip(packed, tokens, tmp_path):
    first = load(packed, device="cpu")
    first.save_pretrained(tmp_path / "again")
    second = load(tmp_path / "again", device="cpu")
    assert first.config.quantization_config.to_dict() == second.config.quantization_config.to_dict()
    assert torch.equal(first.generate(tokens, max_new_tokens=8), second.generate(tokens, max_new_tokens=8))


def test_odd_shapes_are_padded_and_loaded(save_llama, to_ternary, tokens, tmp_path):
    odd = {"hidden_size": 120, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 3}
    source = save_llama(to_ternary, **odd)
    pack(source, tmp_path / "T")
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = load(tmp_path / "T", device="cpu")
    with torch.inference_mode():
        want, got = original(tokens).logits, model(tokens).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3


def test_plain_models_load_as_they_are(plain_model, tokens):
    original = AutoModelForCausalLM.from_pretrained(plain_model, dtype=torch.float32)
    model = load(plain_model, device="cpu")
    assert not model.training and model.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, original(tokens).logits)
    assert load(plain_model, device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_is_no_model_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        load(tmp_path / "nowhere")


def test_dequantize_gives_an_ordinary_model_back(packed, ternary_model, tokens):
    original = AutoModelForCausalLM.from_pretrained(ternary_model, dtype=torch.float32)
    dense = load(packed, device="cpu").dequantize()
    assert not any(isinstance(module, Int2Linear) for module in dense.modules())
    with torch.inference_mode():
        torch.testing.assert_close(dense(tokens).logits, original(tokens).logits)


def in_a_fresh_process(code):
    """Run Python from the repository root, as a user would, and return the process."""
    paths = os.pathsep.join([str(ROOT / "kernels"), str(ROOT / "gptq"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}
    )


@pytest.mark.slow
def test_plain_transformers_refuses_and_loads_once_trirun_is_imported(packed):
    """Else it would make random weights."""
    done = in_a_fresh_process(
        "from transformers import AutoModelForCausalLM\n"
        "try:\n"
        f"    AutoModelForCausalLM.from_pretrained({str(packed)!r})\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, 'mismatched' in str(error))\n"
        "import trirun_cli.integrations.transformers\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(packed)!r})\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["RuntimeError", "True", "Int2Linear"]
