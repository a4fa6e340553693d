"""The parts of quantization-aware training: layers, loss, text, generation."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.scale_search import round_to_nearest
from trirun_gptq.train import losses
from trirun_gptq.train.data import Batches, Text
from trirun_gptq.train.generate import sample
from trirun_gptq.train.layers import AbsmeanLinear, LearnedLinear
from trirun_gptq.train.recipe import TrainRecipe
from trirun_gptq.train.student import held_out_loss, load_model
from trirun_kernels import QuantSpec

from tests.gptq.models import make_model

GRIDS = [(1.0, 4), (1.0, 3), (1.5, 4), (None, 4)]


def learned(zero, levels, act_bits=16, n=12, k=128):
    torch.manual_seed(0)
    linear, spec = nn.Linear(k, n, bias=False), QuantSpec(64, zero)
    weight = linear.weight.detach()
    start = round_to_nearest(weight, spec, levels=levels)
    layer = LearnedLinear(linear, act_bits, spec, levels)
    layer.begin(start, weight)
    return layer, start, weight


@pytest.mark.parametrize(("zero", "levels"), GRIDS)
def test_a_learned_layer_begins_at_its_start_and_stores_what_it_computes(zero, levels):
    layer, start, _ = learned(zero, levels)
    assert torch.equal(layer.weight(), start.dequantize())
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * (parameter is not layer.zeros or zero is None)
    stored = layer.harden()
    assert int(stored.codes.max()) == levels - 1 and not torch.equal(stored.codes, start.codes)
    assert torch.equal(layer.weight(), stored.dequantize())
    assert stored.pack().spec == start.spec


def test_gradients_of_a_learned_layer():
    layer, _, _ = learned(None, 4)
    layer.latent.data *= 1.5
    with torch.no_grad():
        codes = layer.latent.view(12, 2, -1) + layer.zeros.unsqueeze(-1)
        inside = ((codes >= -0.5) & (codes <= 3.5)).view_as(layer.latent)
    assert 0 < (~inside).sum() < inside.numel()
    upstream = torch.randn_like(layer.latent)
    layer.weight().backward(upstream)
    step = layer.base.repeat_interleave(64, 1)
    torch.testing.assert_close(layer.latent.grad, upstream * step * inside)
    centred = (codes.round().clamp(0, 3) - layer.zeros.unsqueeze(-1)).detach()
    grouped = upstream.view(12, 2, -1)
    torch.testing.assert_close(layer.multiplier.grad, (grouped * centred).sum(-1) * layer.base)
    torch.testing.assert_close(layer.zeros.grad, -(grouped * ~inside.view(12, 2, -1)).sum(-1) * layer.base)


def test_an_absmean_layer_is_bitnets_weight_quant():
    torch.manual_seed(1)
    linear = nn.Linear(96, 8, bias=False)
    layer = AbsmeanLinear(linear, 16)
    layer.begin(linear.weight.detach())
    mean = linear.weight.detach().abs().mean()
    expected = (linear.weight.detach() / mean).round().clamp(-1, 1) * mean.half().float()
    torch.testing.assert_close(layer.weight(), expected)
    stored = layer.harden()
    assert torch.equal(layer.weight(), stored.dequantize()) and stored.spec == QuantSpec(-1, 1.0)
    upstream = torch.randn(8, 96)
    layer.weight().backward(upstream)
    # Straight through, clamped weights included.
    torch.testing.assert_close(layer.latent.grad, upstream * layer.base)


def test_int8_activations_are_those_of_the_kernels():
    layer, _, _ = learned(1.0, 3, act_bits=8)
    x = torch.randn(5, 128, requires_grad=True)
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    rounded = (x.detach() / scale).round() * scale
    out = layer(x)
    torch.testing.assert_close(out, F.linear(rounded, layer.weight()))
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight().detach().sum(0).expand(5, -1))


@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (0.7, 0.3), (0.0, 1.0)])
def test_the_chunked_loss_is_the_plain_one(monkeypatch, kl, ce):
    torch.manual_seed(0)
    tokens, width, vocabulary = 11, 8, 29
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    other, other_head = torch.randn(tokens, width), torch.randn(vocabulary, width)
    labels = torch.randint(vocabulary, (tokens,))
    labels[-1] = losses.IGNORED
    logits, wanted = hidden @ head.T, (other @ other_head.T).log_softmax(-1)
    divergence = F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
    entropy = F.cross_entropy(logits[:-1], labels[:-1], reduction="sum")
    expected = torch.autograd.grad(kl * divergence + ce * entropy, (hidden, head))

    monkeypatch.setattr(losses, "PIECE", 4 * vocabulary)
    loss, sums = losses.distillation(hidden, head, other, other_head, labels, kl=kl, ce=ce, dtype=torch.float32)
    torch.testing.assert_close(sums, torch.stack((divergence, entropy)).detach())
    torch.testing.assert_close(loss, kl * divergence + ce * entropy)
    found = torch.autograd.grad(loss * 3, (hidden, head))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs * 3)


def test_every_window_once_per_epoch_at_another_offset():
    text = Text(torch.arange(1000), 10, seed=0)
    first, second = text.read(0, text.count), text.read(text.count, text.count)
    for epoch in (first, second):
        starts = epoch[:, 0].sort().values
        assert len(epoch) == 99 and set(starts.diff().tolist()) == {10}
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(10))
    assert first[:, 0].min() != second[:, 0].min()
    # Any reader at any place sees the same.
    assert torch.equal(Text(torch.arange(1000), 10, seed=0).read(95, 10), torch.cat((first[95:], second[:6])))


def test_devices_share_a_batch():
    text, generated = torch.arange(2000), -torch.arange(400).view(40, 10)
    batches = [Batches(Text(text, 10, 0), generated, 0.5, 8, 0, rank, 2) for rank in (0, 1)]
    whole = torch.cat([part.read(step) for step in range(10) for part in batches])
    real = whole[whole[:, 0] > 0]
    assert len(whole) == 80 and len(real) == 40 and len(real[:, 0].unique()) == 40
    with pytest.raises(QuantizationError, match="7 sequences cannot be split evenly over 2"):
        Batches(Text(text, 10, 0), generated, 0.5, 7, 0, 0, 2)


def test_generated_text_follows_the_models_distribution():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, max_position_embeddings=64, **shape))
    # Peaked enough that a wrong position or a wrong distribution shows.
    model.lm_head.weight.data *= 40
    model.eval()
    prompts = torch.randint(40, (300, 3))
    tokens = sample(model, prompts, 16, seed=0)
    assert tokens.shape == (300, 16) and torch.equal(tokens[:, :3], prompts)
    with torch.no_grad():
        scores = model(tokens).logits[:, 2:-1].log_softmax(-1)
    surprise = -scores.gather(-1, tokens[:, 3:, None]).squeeze(-1)
    excess = surprise + (scores.exp() * scores).sum(-1)
    error = excess.std() / math.sqrt(excess.numel())
    assert abs(float(excess.mean())) < 5 * float(error) < 0.2
    assert torch.equal(tokens, sample(model, prompts, 16, seed=0))


@pytest.mark.parametrize(
    ("count", "batch", "compiled", "sizes"),
    [
        (6, 4, False, [3, 3]),
        (6, 4, True, [4, 4, 4]),
        (4, 8, True, [8]),
        (8, 4, True, [4, 4]),
        (7, 64, True, [7]),
    ],
)
def test_held_out_windows_run_in_the_shape_of_a_training_batch(count, batch, compiled, sizes):
    seen = []

    def distiller(part):
        seen.append(len(part))
        return None, torch.stack((part.sum(), 2.0 * part[:, 1:].sum()))

    windows = torch.arange(count * 5.0).view(count, 5)
    kl, nll = held_out_loss(distiller, windows, batch, compiled=compiled)
    assert seen == sizes
    assert kl == pytest.approx(float(windows.mean())) and nll == pytest.approx(2 * float(windows[:, 1:].mean()))


def test_the_learning_rate_rises_and_falls():
    recipe = TrainRecipe(warmup=0.1, final_lr=0.1)
    rates = [recipe.rate(percent / 100) for percent in range(101)]
    assert rates[5] == pytest.approx(0.5) and max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1)
    assert TrainRecipe(warmup=0.0).rate(0) == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 5}, "unknown key 'step'; did you mean 'steps'"),
        ({"method": "lerned"}, "did you mean 'learned'"),
        ({"steps": 0}, "steps=0: at least 1"),
        ({"kl": 0, "ce": 0}, "nothing to train towards"),
        ({"batch": 32, "micro_batch": 5}, "does not divide"),
        ({"method": "absmean"}, "one scale per matrix"),
        ({"group_size": 100}, "group_size=100"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"text_share": 1.5}, "text_share=1.5"),
    ],
)
def test_a_bad_recipe_is_one_clear_line(values, message):
    with pytest.raises(QuantizationError, match=message) as raised:
        TrainRecipe.from_dict(values)
    assert "\n" not in str(raised.value)


def test_a_model_that_lacks_a_tensor_is_not_trained(tmp_path, capfd):
    make_model(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, {"format": "pt"})
    capfd.readouterr()
    with pytest.raises(QuantizationError, match=f"tensor {name} is missing"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert capfd.readouterr().err == ""
