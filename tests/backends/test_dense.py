"""Padding and TF32: results stay what they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from trirun_cli.backends.transformers.dense import PaddedLinear, matmul_precision, pad_dense

SMALL = dict(num_hidden_layers=2, num_attention_heads=3, vocab_size=1003)


def make(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(13, 9), (16, 9), (13, 8)])
def test_padded_linear_equals_the_linear(n, k, bias):
    linear = nn.Linear(k, n, bias=bias)
    padded = PaddedLinear(linear)
    assert all(size % 8 == 0 for size in padded.weight.shape)
    x = torch.randn(2, 5, k)
    torch.testing.assert_close(padded(x), linear(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_model_gives_the_same_logits(tied):
    config = LlamaConfig(hidden_size=36, intermediate_size=75, tie_word_embeddings=tied, head_dim=12, **SMALL)
    model, tokens = make(config), torch.arange(20).unsqueeze(0)
    before = model(tokens).logits
    padded = pad_dense(model)
    assert padded[0] == "vocabulary 1003 → 1024"
    # 36 is no multiple of 8, and every linear has it on one side.
    assert len(padded) == 1 + 2 * 7 + 1
    after = model(tokens).logits
    assert after.shape[-1] >= 1024 - 1024 % 64 and torch.allclose(after[..., :1003], before, atol=1e-5)
    assert not after[..., 1003:].any()
    assert (model.get_input_embeddings().weight.shape[0] == 1024) == tied


def test_what_fits_is_left_alone():
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=128)
    assert pad_dense(make(LlamaConfig(num_hidden_layers=1, **sizes))) == []


def test_other_kinds_of_layers_are_left_alone():
    model, tokens = make(GPT2Config(n_embd=36, n_layer=1, n_head=3, vocab_size=515)), torch.arange(9).unsqueeze(0)
    before = model(tokens).logits
    assert pad_dense(model)[0] == "vocabulary 515 → 576"
    assert torch.allclose(model(tokens).logits[..., :515], before, atol=1e-5)


def test_precision_is_restored():
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    with pytest.raises(KeyError), matmul_precision(True):
        assert settings.fp32_precision == "tf32"
        raise KeyError
    assert settings.fp32_precision == before
