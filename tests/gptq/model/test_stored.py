"""Names in the files and names in the model: every tensor is found where transformers would load it from."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.experts import Cut, expert_of
from trirun_gptq.model.loader import Skeleton, TensorSource
from trirun_gptq.model.writer import unquantized
from trirun_kernels.weights.experts import fused_layout

from tests.gptq.models import SIZES

MOE = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32}
MOE |= {"num_experts_per_tok": 2, "head_dim": 16}
# What transformers does between the files and the model.
FAMILIES = {
    "llama": {},  # nothing
    "gpt2": {"tie_word_embeddings": False},  # nothing; the model is changed
    "granitemoe": MOE,  # a router's rename, experts fused in the files
    "qwen3_moe": MOE,  # experts merged
    "mixtral": MOE,  # another rename and experts merged
    "phimoe": MOE,  # the same of a router
    "glm4_moe": MOE | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": MOE,  # experts transposed, gates and ups in turn, biases
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},  # experts that stay fused
}


def save(family, directory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model


def of_model(model, name):
    """A tensor of the model as transformers has it, by the name of the linear layer that takes its place."""
    expert = expert_of(name)
    if expert is None:
        value = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
        return (
            value.T
            if value.dim() == 2 and type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
            else value
        )
    name = f"{'down_proj' if expert.layer == 'down' else 'gate_up_proj'}{'_bias' if expert.part == 'bias' else ''}"
    experts = model.get_submodule(expert.path)
    return Cut(expert.index, {"gate": 0, "up": 1}.get(expert.layer), fused_layout(experts))(getattr(experts, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_found(tmp_path, family):
    model = save(family, tmp_path)
    source = TensorSource(tmp_path)
    skeleton = Skeleton(source)
    skeleton.require_tensors()
    for name, parameter in skeleton.model.named_parameters():
        assert source.shape(name) == list(parameter.shape)
        expected = of_model(model, name)
        assert torch.equal(source.read(name), expected), name
    assert not [group.sources for group in source.stored.groups if not group.targets]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_replacement_every_tensor_is_written_once(tmp_path, family):
    """Those of experts and of GPT-2's layers as the changed model has them, all others as they were stored."""
    save(family, tmp_path)
    source, stored = TensorSource(tmp_path), load_file(tmp_path / "model.safetensors")
    written = [pair for group in source.stored.groups for pair in unquantized(source.stored, group, ())]
    assert len(written) == len(dict(written))
    for name, tensor in written:
        assert torch.equal(tensor, source.read(name) if name in source.stored else stored[name])
    sizes = (sum(tensor.numel() for tensor in tensors.values()) for tensors in (dict(written), stored))
    assert len(set(sizes)) == 1


def test_of_a_mixture_that_is_replaced_in_part_the_rest_is_written_apart(tmp_path):
    save("qwen3_moe", tmp_path)
    source = TensorSource(tmp_path)
    replaced = "model.layers.0.mlp.experts.1.up.weight"
    (group,) = (group for group in source.stored.groups if replaced in group.targets)
    names = [name for name, _ in unquantized(source.stored, group, {replaced})]
    assert len(names) == 2 * 4 - 1 and replaced not in names and all(".experts." in name for name in names)


def test_one_missing_expert_is_named(tmp_path):
    save("qwen3_moe", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"tensor model\.layers\.1\.mlp\.experts\.2\.up\.weight is missing"):
        Skeleton(TensorSource(tmp_path)).require_tensors()
