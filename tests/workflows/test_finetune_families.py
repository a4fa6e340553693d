"""``trirun finetune`` of models whose matrices are no plain linear layers in transformers, or that see as well."""

import shutil

import pytest
import torch
from transformers import AutoConfig
from trirun_gptq.model.meta import auto_class
from trirun_kernels.gemm.linear import Int2Linear

from tests.small_models import SIZES
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.integrations.transformers import load
from trirun_cli.workflows.finetune import finetune

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = SIZES | {"vocab_size": 8192, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EYE = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# Their settings, and how many layers are packed: 4 of attention and 3 for each of 4 experts, in two blocks.
FAMILIES = {
    "qwen3_moe": (TEXT | EXPERTS, 2 * (4 + 3 * 4)),
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 8192, "n_positions": 64}, 2 * 4),
    "qwen2_5_vl": ({"text_config": TEXT | {"rope_parameters": ROTARY}, "vision_config": EYE}, 2 * 7),
}


def make(family, settings, demo_tokenizer, out):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    auto_class(config).from_config(config).save_pretrained(out)
    for file in demo_tokenizer:
        shutil.copy(file, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_kinds_are_trained(family, demo_tokenizer, tmp_path):
    settings, layers = FAMILIES[family]
    model, out = make(family, settings, demo_tokenizer, tmp_path / "model"), tmp_path / "F"
    options = {"group_size": 32, "seqlen": 32, "batch": 4, "held_out": 4, "precision": "fp32", "init": "nearest"}
    options |= {"kl": 0.0, "ce": 1.0, "evaluations": 1}
    report = finetune(model, out, steps=3, rest_lr=1e-2, **options)
    assert report.best.step == 3
    assert report.packed_perplexity == pytest.approx(report.trained_perplexity, rel=2e-3)
    checkpoint = Checkpoint(out)
    assert len(checkpoint.modules) == layers
    assert sum(isinstance(module, Int2Linear) for module in load(out, device="cpu").modules()) == layers
    before, after = ModelDir(model), ModelDir(out)
    # What was trained beside the layers is stored by the names of the files; what sees is as it was.
    for name in {*before.names} & {*after.names}:
        trained = name.endswith(("embed_tokens.weight", "wte.weight", "norm.weight", "ln_f.weight"))
        if trained or "visual" in name:
            assert torch.equal(before.tensor(name), after.tensor(name)) != trained, name
    assert any("norm" in name or "ln_f" in name for name in after.names)

    healed = finetune(model, tmp_path / "H", steps=1, rest_lr=0.0, **options | {"init": str(out)})
    # It begins where the first one ended, with all that was trained.
    first = healed.evaluations[0].nll
    assert first == pytest.approx(report.evaluations[-1].nll, abs=2e-3)
