"""Mixtures of experts: fused tensors taken apart, every expert quantized on the tokens that chose it."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from trirun_gptq.block.walk import BlockRun
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.experts import Cut
from trirun_gptq.model.loader import Skeleton, TensorSource
from trirun_gptq.recipe import Override
from trirun_kernels import PackedWeight, dequantize
from trirun_kernels.weights.experts import SeparateExperts, fused_layout, separate_experts

from tests.gptq.models import RECIPE, SIZES, Log, calibration, make_model, run

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {
    "Qwen3Moe": MOE,
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
}


# Where a fused module has an expert's matrices, and which half of the rows they are.
PLACES = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


def fused_model(family, **extra):
    """A random model as transformers makes it, experts fused."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **extra})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_separate_experts_compute_what_fused_ones_do(family):
    model = fused_model(family)
    for name, parameter in model.named_parameters():
        if name.endswith(("_proj_bias", "router.bias")):
            parameter.data.normal_()
    tokens = torch.stack(calibration(3))
    with torch.no_grad():
        expected = model(tokens).logits
        weights = {name: m for name, m in model.named_modules() if fused_layout(m)}
        assert len(weights) == 2
        separate_experts(model)
        for name, fused in weights.items():
            experts = model.get_submodule(name)
            assert isinstance(experts, SeparateExperts)
            for index, expert in enumerate(experts.children()):
                for layer, (source, half) in PLACES.items():
                    cut = Cut(index, half, experts.layout)
                    getattr(expert, layer).weight = nn.Parameter(cut(getattr(fused, source)))
                    if experts.layout.biased:
                        getattr(expert, layer).bias = nn.Parameter(cut(getattr(fused, f"{source}_bias")))
        torch.testing.assert_close(model(tokens).logits, expected)


def test_experts_that_compute_something_else_stay_fused():
    fused = next(module for module in fused_model("Mixtral").modules() if fused_layout(module))
    kind = type(fused)
    clamped = type("Clamped", (kind,), {"_apply_gate": Clamping._apply_gate})
    beam = type("BeamExperts", (kind,), {"_apply_gate": Clamping._apply_gate})
    for own, expected in ((clamped, False), (type("Heir", (clamped,), {}), False), (beam, True), (kind, True)):
        fused.__class__ = own
        assert (fused_layout(fused) is not None) == expected
    fused.post_expert_norm = nn.RMSNorm(4)
    assert not fused_layout(fused)


class Clamping:
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=1)) * up


def dense_reference(directory, written, report):
    """The quantized model: the fused original with every expert's slice replaced."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for module in report.modules:
        parts = (written[f"{module.name}.{key}"] for key in ("weight", "weight_scale"))
        weight = dequantize(PackedWeight(*parts, None, module.n, module.k, module.spec))
        path, _, rest = module.name.partition(".experts.")
        if not rest:
            model.get_submodule(module.name).weight.data.copy_(weight)
            continue
        experts, (index, layer) = model.get_submodule(f"{path}.experts"), rest.split(".")
        source, half = PLACES[layer]
        Cut(int(index), half, fused_layout(experts))(getattr(experts, source).data).copy_(weight)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fused", [False, True])
def test_every_expert_is_quantized_on_its_own_tokens(tmp_path, family, fused):
    make_model(tmp_path, family, torch.float32, **FAMILIES[family])
    if fused:
        # As a model is saved that was never taken apart.
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        (tmp_path / "model.safetensors").unlink()
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    sequences = calibration()
    written, report, _ = run(tmp_path, replace(RECIPE, correction=0.5), sequences)
    experts = {module.name: module for module in report.modules if ".experts." in module.name}
    assert len(experts) == 2 * 4 * 3
    # Every token chooses two experts.
    for layer in (0, 1):
        reached = [m.tokens for name, m in experts.items() if f"layers.{layer}." in name and name.endswith(".gate")]
        assert len(reached) == 4 and sum(reached) == 2 * 6 * 24
    assert all(module.loss < 0.9 for module in experts.values())
    assert not any("gate_up_proj" in name or ".w1" in name or (".down_proj.weight" in name and "experts" in name)
                   for name in written)  # fmt: skip
    reference = dense_reference(tmp_path, written, report)
    with torch.no_grad():
        logits = reference(torch.stack(sequences[RECIPE.samples :])).logits[:, :-1]
        wanted = torch.stack(sequences[RECIPE.samples :])[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    assert report.predictions.perplexity == pytest.approx(loss.exp().item(), rel=0.1)


@pytest.mark.parametrize("sequential", [True, False])
def test_the_experts_of_a_layer_share_the_grid_of_least_summed_error(tmp_path, monkeypatch, sequential):
    make_model(tmp_path, "Qwen3Moe", torch.float32, **MOE)
    tried, solutions = {}, BlockRun._solutions

    def noted(block, weight, system, hessian, *others):
        errors, found = solutions(block, weight, system, hessian, *others)
        tried[hessian.name] = errors
        return errors, found

    monkeypatch.setattr(BlockRun, "_solutions", noted)
    recipe = replace(RECIPE, grid="auto", sequential=sequential, overrides={r"experts\.3\.down": Override(grid="zero")})
    _, report, _ = run(tmp_path, recipe)
    chosen = {m.name: m.spec for m in report.modules if ".experts." in m.name}
    alone = []
    for layer in (0, 1):
        for first, parts in (("gate", ("gate", "up")), ("down", ("down",))):
            experts = [index for index in range(4) if (index, first) != (3, "down")]
            path = f"model.layers.{layer}.mlp.experts"
            errors = [tried[f"{path}.{index}.{first}"] for index in experts]
            sums = [sum(each) for each in zip(*errors, strict=True)]
            best = [grid.spec for grid in recipe.candidates(f"{path}.0.{first}")][sums.index(min(sums))]
            assert {chosen[f"{path}.{index}.{part}"] for index in experts for part in parts} == {best}
            alone += [each.index(min(each)) != sums.index(min(sums)) for each in errors]
        # A candidate of its own is a grid of its own.
        assert chosen[f"{path}.3.down"].zero is None
    # Matrix by matrix, some would have got the other grid.
    assert any(alone)


def test_fused_experts_of_another_shape_are_named_before_anything_is_computed(tmp_path):
    make_model(tmp_path, "Qwen3Moe", torch.float32, **MOE)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for change, shape in ((lambda t: t[:3], r"\[3, 64, 64\]"), (lambda t: t[:, :60], r"\[30, 64\]")):
        damaged = tensors | {name: change(tensors[name]).contiguous()}
        save_file(damaged, tmp_path / "model.safetensors", {"format": "pt"})
        skeleton = Skeleton(TensorSource(tmp_path))
        with pytest.raises(QuantizationError, match=rf"layers\.1\.mlp\.experts\.\d\.gate\.weight: {shape} in the file"):
            skeleton.require_tensors()


class Warnings(Log):
    def __init__(self):
        super().__init__()
        self.warnings = []

    def warning(self, message):
        self.warnings.append(message)


def test_starved_experts_are_named_and_fed(tmp_path):
    from trirun_gptq.pipeline import quantize_model

    from tests.gptq.models import Tensors

    make_model(tmp_path, "Qwen3Moe", torch.float32, **MOE)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith("layers.0.mlp.gate.weight"):
            # Experts 0 and 1 draw every token: the scores of 2 and 3 are the lowest whatever the input.
            tensors[name][:2], tensors[name][2:] = tensors[name][:1] * 0, tensors[name][:1] * 0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    log = Warnings()
    report = quantize_model(tmp_path, RECIPE, calibration(), Tensors(), log)
    reached = {m.name: m.tokens for m in report.modules if "layers.0.mlp.experts" in m.name}
    starved = [name for name, tokens in reached.items() if tokens == 0]
    assert len(starved) == 2 * 3
    messages = " ".join(message for message in log.warnings if "layers.0" in message and "fewer tokens" in message)
    # Gate and up read the same input, which goes by the first one's name.
    assert all(f"{name.split('layers.0.')[1]} (0)" in messages for name in starved if not name.endswith(".up"))
    assert all(m.loss < 0.9 for m in report.modules)


def test_an_expert_that_is_kept_goes_by_its_own_name(tmp_path):
    make_model(tmp_path, "Qwen3Moe", torch.float32, **MOE)
    source = load_file(tmp_path / "model.safetensors")
    recipe = replace(RECIPE, overrides={r"layers\.0\.mlp\.experts\.1\.": Override(keep=True)})
    written, report, _ = run(tmp_path, recipe)
    kept = written["model.layers.0.mlp.experts.1.up.weight"]
    assert torch.equal(kept, source["model.layers.0.mlp.experts.1.up_proj.weight"])
    assert "model.layers.0.mlp.experts.1.gate" in report.kept


BIASED = {
    "MiniMaxM2": ("block_sparse_moe", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "ExaoneMoe": ("mlp", MOE | {"first_k_dense_replace": 0, "sliding_window": 16}),
}


def save_with_biases(directory, family):
    """A random model whose routers' biases are no zeros, as transformers saves it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | BIASED[family][1])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", BIASED)
def test_buffers_are_found_under_their_stored_names(tmp_path, family):
    model = save_with_biases(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    assert f"model.layers.1.{BIASED[family][0]}.e_score_correction_bias" in stored
    found = dict(Skeleton(TensorSource(tmp_path)).load_block(1, torch.device("cpu")).named_buffers())
    biases = {name: value for name, value in found.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 1
    for name, value in biases.items():
        assert torch.equal(value, model.model.layers[1].get_buffer(name)) and value.any()


def test_a_buffer_under_an_unknown_name_is_refused(tmp_path):
    save_with_biases(tmp_path, "MiniMaxM2")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    bias = stored.pop("model.layers.1.block_sparse_moe.e_score_correction_bias")
    save_file(stored | {"model.layers.1.block_sparse_moe.expert_bias": bias}, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"e_score_correction_bias is missing, and nothing takes .*expert_bias"):
        Skeleton(TensorSource(tmp_path)).load_block(1, torch.device("cpu"))
    save_file(stored, file, {"format": "pt"})
    buffers = dict(Skeleton(TensorSource(tmp_path)).load_block(1, torch.device("cpu")).named_buffers())
    assert not buffers["mlp.e_score_correction_bias"].any()
