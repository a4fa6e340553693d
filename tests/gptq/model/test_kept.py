"""What cannot be two bits wide does not refuse a model: the rest is quantized, and it is kept and named."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from trirun_gptq.model.inputs import input_groups
from trirun_gptq.model.loader import decoder_blocks, is_quantizable, kept_modules, linear_layers

from tests.gptq.models import RECIPE, SIZES, load_result, make_model, run


def test_a_convolution_is_kept(tmp_path):
    make_model(tmp_path, "Lfm2", torch.float32, full_attn_idxs=[1], block_multiple_of=32)
    written, report, _ = run(tmp_path)
    assert report.kept == ["model.layers.0.conv.conv"] and len(report.modules) == 2 * 3 + 2 + 4
    name = "model.layers.0.conv.conv.weight"
    assert torch.equal(written[name], load_file(tmp_path / "model.safetensors")[name])


def test_experts_fused_in_a_way_of_their_own_are_kept(tmp_path):
    extra = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 16}
    make_model(tmp_path, "AriaText", torch.float32, **extra)
    written, report, _ = run(tmp_path)
    assert {f"model.layers.{layer}.mlp.experts" for layer in (0, 1)} <= set(report.kept)
    assert len(report.modules) == 2 * (4 + 3)
    stored = load_file(tmp_path / "model.safetensors")
    quantized = {f"{module.name}.weight" for module in report.modules}
    assert written.keys() >= stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored if name not in quantized)


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_the_layers_of_gpt2_are_quantized_as_the_linear_layers_they_are(tmp_path, correction):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=120, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    written, report, _ = run(tmp_path, replace(RECIPE, correction=correction))
    assert len(report.modules) == 8 and not report.kept
    shapes = {module.name: (module.n, module.k) for module in report.modules}
    assert shapes["transformer.h.1.attn.c_attn"] == (192, 64) and shapes["transformer.h.1.mlp.c_proj"] == (64, 256)
    # An error of a transposed weight would be of the weight's own size.
    assert all(module.loss < 0.9 for module in report.modules)
    assert written["transformer.h.0.attn.c_attn.bias"].shape == (192,)


def test_blocks_that_answer_with_pairs(tmp_path):
    make_model(tmp_path, "Mpt", torch.float32, d_model=64, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=120)
    written, report, _ = run(tmp_path)
    assert len(report.modules) == 2 * 4
    from tests.gptq.models import calibration

    tokens = torch.stack(calibration()[RECIPE.samples :])
    with torch.no_grad():
        logits = load_result(tmp_path, written, report)(tokens).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert report.predictions.perplexity == pytest.approx(loss.exp().item(), rel=0.05)


class Router(nn.Linear):
    def forward(self, input):
        return super().forward(input).softmax(-1)


class Spelled(nn.Linear):
    """As Falcon has them."""

    def forward(self, input):
        return input @ self.weight.T if self.bias is None else input @ self.weight.T + self.bias


def test_what_is_a_linear_layer():
    assert is_quantizable(Spelled(64, 8)) and is_quantizable(Spelled(64, 8, bias=False))
    small, single, plain = nn.Linear(16, 64), nn.Linear(64, 1), nn.Linear(64, 8)
    assert is_quantizable(plain) and not any(map(is_quantizable, (Router(64, 8), small, single, nn.Conv1d(64, 64, 1))))
    block = nn.ModuleDict({"plain": plain, "router": Router(64, 8), "small": small, "norm": nn.LayerNorm(64)})
    assert kept_modules(block) == {"router": "Router [8, 64]", "small": "Linear [64, 16]"}
    # One that holds its layer (Gemma 4) is kept as well.
    block = nn.ModuleDict({"plain": plain, "router": type("TextRouter", (Looking,), {})()})
    assert [*linear_layers(block)] == ["plain"] and "router.seen" in kept_modules(block)


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.read, self.twice = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, states):
        states = self.seen(states).to(self.read.weight.dtype)
        return self.twice(self.twice(self.read(states)))


def test_layers_whose_weight_is_read_by_others_or_that_run_twice_are_not_grouped():
    from trirun_gptq.model.activations import Batch, Placement

    states, cpu = torch.randn(1, 4, 64), torch.device("cpu")
    batch = Batch(Placement(cpu, cpu), 0, torch.zeros(1, 4, dtype=torch.int64), [((), {})], states, states)
    block = Looking()
    assert input_groups(block, 0, batch, dict(block.named_children())) == [[["seen"]]]
    assert all(type(layer) is nn.Linear for layer in block.children())


def test_blocks_of_several_kinds_are_one_list():
    config = transformers.JambaConfig(**SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 32})
    model = transformers.JambaForCausalLM(config)
    name, blocks = decoder_blocks(model)
    assert name == "model.layers" and len(blocks) == 2
