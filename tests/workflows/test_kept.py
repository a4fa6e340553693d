"""Models with parts that cannot be two bits wide, through the workflows: these are named, the rest is packed."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trirun_gptq.run.progress import Warned
from trirun_kernels.gemm.linear import Int2Linear

from tests.small_models import SIZES
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.checkpoint.verify import verify_modules
from trirun_cli.errors import InputError, UsageError
from trirun_cli.integrations.transformers import load
from trirun_cli.models.linears import linear_layers
from trirun_cli.workflows.pack import pack
from trirun_cli.workflows.quantize_plan import plan_quantize

MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.fixture
def plan(tmp_path):
    """Plans a run on a tiny llama4_text, whose fused experts are of a kind of their own; collects the warnings."""
    own = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 160, "head_dim": 16}
    config = AutoConfig.for_model("llama4_text", **SIZES | own | {"interleave_moe_layer_step": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Some words.")

    def make(*overrides):
        warnings = []
        options = {"preset": "fast", "recipe": None, "settings": {"group_size": 32}, "overrides": overrides}
        made = plan_quantize(
            tmp_path / "model",
            tmp_path / "out",
            calibration=str(tmp_path / "text.txt"),
            device="cpu",
            overwrite=False,
            progress=lambda event: warnings.append(event.message) if isinstance(event, Warned) else None,
            **options,
        )
        return made, warnings

    return make


def test_what_is_kept_is_named(plan):
    made, warnings = plan()
    experts = [f"model.layers.{layer}.feed_forward.experts" for layer in (0, 1)]
    assert {name: kind for name, kind in made.kept.items() if name in experts} == dict.fromkeys(
        experts, "Llama4TextExperts [4, 64, 320]"
    )
    assert made.to_dict()["kept"] == made.kept
    assert any(
        "2 × model.layers.*.feed_forward.experts (Llama4TextExperts [4, 64, 320])" in message for message in warnings
    )
    # Eight projections of attention, and the shared experts.
    assert made.weights == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64)


def test_overrides_reach_modules_of_every_kind(plan):
    made, warnings = plan(
        r"feed_forward\.experts$=keep", "embed_tokens=keep", r"0\.self_attn\.q_proj=keep", "norm=keep"
    )
    assert made.weights == plan()[0].weights - 64 * 64
    assert made.asked == {
        "model.embed_tokens": "Embedding [96, 64]",
        "model.layers.0.self_attn.q_proj": "Linear [64, 64]",
        "model.layers.0.feed_forward.experts": "Llama4TextExperts [4, 64, 320]",
        "model.layers.1.feed_forward.experts": "Llama4TextExperts [4, 64, 320]",
    }
    assert made.to_recipe()["kept"] == made.kept | made.asked
    # Of what was asked for there is nothing to warn.
    assert any("router" in message for message in warnings) and not any("experts" in message for message in warnings)


def test_patterns_that_have_no_effect_are_refused(plan):
    with pytest.raises(UsageError, match="'nothing_of_this_name' matches none of the model's modules"):
        plan("nothing_of_this_name=keep")
    with pytest.raises(UsageError, match="matches none") as refused:
        plan("self_attn.query_proj=keep")
    assert refused.value.fix == "the name most like it is model.layers.0.self_attn.q_proj"
    with pytest.raises(UsageError, match=r"'router' matches no layer that is quantized: .*router \(Llama4Router"):
        plan("router=g64")


def test_pack_names_the_fused_experts_it_leaves(plan, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("self_attn" in name or "shared_expert" in name) and parameter.dim() == 2:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 2.0**-3)
    model.save_pretrained(tmp_path / "ternary")
    report = pack(tmp_path / "ternary", tmp_path / "packed", keep=r"1\.feed_forward\.experts$")
    why = {matrix.name: matrix.why for matrix in report.kept}
    assert why["model.layers.0.feed_forward.experts.gate_up_proj"] == "no linear layer"
    kept = [why[f"model.layers.1.feed_forward.experts.{name}_proj"] for name in ("gate_up", "down")]
    assert kept == ["--keep", "--keep"]
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.add_(0.1)
    model.save_pretrained(tmp_path / "mixed")
    with pytest.raises(InputError, match="o_proj") as refused:
        pack(tmp_path / "mixed", tmp_path / "other")
    assert "--keep REGEX" in refused.value.fix


@pytest.mark.parametrize("family", ["gpt2", "granitemoe", "qwen3_moe", "mixtral", "phimoe", "qwen3_next", "gpt_oss"])
def test_ternary_models_of_other_kinds_pack_without_loss(family, tmp_path):
    torch.manual_seed(0)
    extra = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    extra |= {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | MOE | extra)).eval()
    kept = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and id(parameter) not in kept:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 2.0**-3)
    model.save_pretrained(tmp_path / "model")
    assert pack(tmp_path / "model", tmp_path / "packed").exact
    checkpoint = Checkpoint(tmp_path / "packed")
    assert not any(
        problem for _, problem in verify_modules(checkpoint, linear_layers(checkpoint), ModelDir(tmp_path / "model"))
    )
    loaded = load(tmp_path / "packed", device="cpu")
    packed = sum(isinstance(module, Int2Linear) for module in loaded.modules())
    assert packed == len(checkpoint.modules) >= 8
    tokens = torch.randint(3, 96, (1, 20))
    with torch.inference_mode():
        want, got = model(tokens, use_cache=False).logits, loaded(tokens, use_cache=False).logits
    assert ((got - want).norm() / want.norm()).item() < 1e-3
