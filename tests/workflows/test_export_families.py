"""Models of many families as GGUF files, by llama.cpp's names, orders and settings; what llama.cpp itself computes from
them is in tests/checkpoint/formats/test_other_programs.py."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_models import AS_LLAMA_CPP, FAMILIES, save_ternary
from tests.workflows.test_export import read_gguf
from trirun_cli.errors import InputError
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

_LAYER = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
_MLP = "ffn_gate ffn_up ffn_down"
_POST = f"attn_q attn_k attn_v attn_output post_attention_norm {_MLP} post_ffw_norm attn_q_norm attn_k_norm"
_GEMMA4 = f"{_LAYER} post_attention_norm post_ffw_norm attn_q_norm attn_k_norm layer_output_scale"
# Of each family: llama.cpp's architecture, the tensors of layer 1 that are weights, and some of what the file says.
_FILES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("llama", _LAYER, {"rope.dimension_count": 16, "attention.layer_norm_rms_epsilon": 1e-6}),
    "qwen2": ("qwen2", _LAYER, {}),
    "qwen3": ("qwen3", f"{_LAYER} attn_q_norm attn_k_norm", {"attention.key_length": 32}),
    "gemma": ("gemma", _LAYER, {}),
    "gemma2": (
        "gemma2",
        f"{_LAYER} post_attention_norm post_ffw_norm",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "attention.sliding_window": 24,
         "attention.sliding_window_pattern": [True, False]},
    ),
    "gemma3_text": (
        "gemma3",
        f"{_LAYER} post_attention_norm post_ffw_norm attn_q_norm attn_k_norm",
        {"attention.sliding_window_pattern": [True, True, True, False], "rope.freq_base": 1e6,
         "rope.freq_base_swa": 1e4},
    ),
    # Layer 1 has no values of its own: they are its keys.
    "gemma4_text": (
        "gemma4",
        _GEMMA4.replace("attn_v ", ""),
        {"attention.key_length": 64, "attention.key_length_swa": 32, "attention.head_count_kv": [2, 1, 2, 1],
         "rope.dimension_count": 64, "rope.dimension_count_swa": 32, "attention.shared_kv_layers": 0,
         "embedding_length_per_layer_input": 0, "final_logit_softcapping": 20.0, "feed_forward_length": 160},
    ),
    "gemma4_text, E": (
        "gemma4",
        f"{_GEMMA4} inp_gate proj post_norm",
        {"embedding_length_per_layer_input": 48, "attention.shared_kv_layers": 3, "attention.head_count_kv": 2,
         "feed_forward_length": [160] * 3 + [320] * 3},
    ),
    "gemma4_text, experts": (
        "gemma4",
        f"{_GEMMA4} ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps pre_ffw_norm_2 post_ffw_norm_1 "
        "post_ffw_norm_2".replace("attn_v ", ""),
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 96},
    ),
    "phi3": ("phi3", "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down", {}),
    "granite": (
        "granite", _LAYER,
        {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 4.0},
    ),
    "glm4": (
        "glm4",
        "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_up ffn_down post_attention_norm post_ffw_norm",
        {"rope.dimension_count": 8},
    ),
    "olmo": ("olmo", f"attn_q attn_k attn_v attn_output {_MLP}", {"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": ("olmo2", _POST, {}),
    "olmo3": ("olmo2", _POST, {"attention.sliding_window": 24}),
    "smollm3": ("smollm3", _LAYER, {}),
    "cohere2": (
        "cohere2", _LAYER.replace("ffn_norm ", ""),
        {"logit_scale": 0.3, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "starcoder2": ("starcoder2", _LAYER.replace("ffn_gate ", ""), {"context_length": 24}),
    "seed_oss": ("seed_oss", _LAYER.replace("ffn_norm", "post_attention_norm"), {}),
    "glm4_moe": (
        "glm4moe",
        "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm post_attention_norm ffn_gate_inp "
        "ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp",
        {"expert_count": 8, "expert_used_count": 3, "expert_shared_count": 1, "leading_dense_block_count": 1,
         "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 4},
    ),
    "gpt_oss": (
        "gpt-oss",
        "attn_norm attn_q attn_k attn_v attn_output attn_sinks post_attention_norm ffn_gate_inp ffn_gate_exps "
        "ffn_up_exps ffn_down_exps",
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 160, "rope.scaling.factor": 4.0,
         "attention.sliding_window_pattern": [True, False, True, False]},
    ),
    "granitemoe": (
        "granitemoe",
        _LAYER.replace(_MLP, "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"),
        {"expert_count": 6, "residual_scale": 0.3},
    ),
    "qwen3_next": (
        "qwen3next",
        "attn_norm attn_qkv attn_gate ssm_ba ssm_conv1d ssm_norm ssm_out post_attention_norm ffn_gate_inp "
        "ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_inp_shexp ffn_gate_shexp ffn_up_shexp ffn_down_shexp",
        {"expert_count": 8, "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 128},
    ),
    "qwen3_5_text": (
        "qwen35",
        "attn_norm attn_qkv attn_gate ssm_beta ssm_alpha ssm_conv1d ssm_norm ssm_out post_attention_norm ffn_gate "
        "ffn_up ffn_down",
        {"ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
         "attention.recurrent_layers": [True, True, True, False], "rope.dimension_sections": [11, 11, 10, 0]},
    ),
}  # fmt: skip


_UNROUNDED = AS_LLAMA_CPP["gpt_oss"]["rope_parameters"] | {"truncate": False}


@pytest.fixture
def exported(tmp_path, demo_tokenizer):
    """``exported(family)``: a small model of it, and its F16 file's metadata and tensors."""

    def make(family, **change):
        change = {"vocab_size": 8192} | FAMILIES[family] | AS_LLAMA_CPP.get(family, {}) | change
        model, _, packed = save_ternary(family.partition(",")[0], change, tmp_path)
        for file in demo_tokenizer:
            shutil.copy(file, packed)
        export(packed, tmp_path / "f.gguf", to="gguf:F16", pre="gpt-2")
        return model, *read_gguf(tmp_path / "f.gguf")

    return make


def values(tensor):
    """A float tensor of a file, [rows, columns]."""
    dimensions, kind, data = tensor
    dtype = {0: torch.float32, 1: torch.float16}[kind]
    return torch.frombuffer(bytearray(data), dtype=dtype).view(dimensions[::-1]).float()


@pytest.mark.parametrize("family", _FILES)
def test_the_families_that_llama_cpp_has(exported, family):
    architecture, layer, said = _FILES[family]
    _, metadata, tensors = exported(family)
    assert metadata["general.architecture"] == architecture
    found = {name: metadata.get(f"{architecture}.{name}") for name in said}
    assert found == {name: pytest.approx(value) for name, value in said.items()}
    weights = {name for name in tensors if name.startswith("blk.1.") and name.endswith(".weight")}
    assert weights == {f"blk.1.{name}.weight" for name in layer.split()}
    assert ("blk.1.attn_q.bias" in tensors) == (family in ("qwen2", "starcoder2", "glm4", "seed_oss", "gpt_oss"))


def test_norms_are_written_as_what_they_multiply_by(exported):
    model, _, tensors = exported("gemma2")
    stored = model.model.layers[1].post_feedforward_layernorm.weight
    assert torch.equal(values(tensors["blk.1.post_ffw_norm.weight"]), stored.detach() + 1)
    assert torch.equal(values(tensors["output_norm.weight"]), model.model.norm.weight.detach() + 1)


def test_heads_of_gemma_4_turn_in_part_by_factors_of_their_frequencies(exported):
    """A quarter of the pairs of the layers that see everything."""
    _, _, tensors = exported("gemma4_text")
    factors = values(tensors["rope_freqs.weight"])
    assert factors.tolist() == [1.0] * 8 + [pytest.approx(1e30)] * 24


def test_experts_of_gemma_4_have_norms_and_factors_of_their_own(exported):
    model, _, tensors = exported("gemma4_text, experts")
    layer = model.model.layers[1]
    stored = {
        "ffn_gate_inp.scale": layer.router.scale, "ffn_down_exps.scale": layer.router.per_expert_scale,
        "ffn_gate_inp.weight": layer.router.proj.weight,
        "pre_ffw_norm_2.weight": layer.pre_feedforward_layernorm_2.weight,
        "ffn_norm.weight": layer.pre_feedforward_layernorm.weight, "layer_output_scale.weight": layer.layer_scalar,
        "ffn_down.weight": layer.mlp.down_proj.weight, "ffn_down_exps.weight": layer.experts.down_proj,
    }  # fmt: skip
    for name, tensor in stored.items():
        assert torch.equal(values(tensors[f"blk.1.{name}"]), tensor.detach().float()), name


def test_keys_that_nothing_reads_are_left_out(tmp_path, demo_tokenizer):
    """Published models have them in layers that attend to those of others."""
    change = {"vocab_size": 8192} | FAMILIES["gemma4_text, E"] | AS_LLAMA_CPP["gemma4_text, E"]
    _, model, packed = save_ternary("gemma4_text", change, tmp_path)
    tensors, parts = load_file(model / "model.safetensors"), ("k_proj", "v_proj", "k_norm")
    tensors |= {
        f"model.layers.{layer}.self_attn.{part}.weight": tensors[f"model.layers.{layer - 3}.self_attn.{part}.weight"]
        for layer in (3, 4, 5)
        for part in parts
    }
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, model / "model.safetensors")
    pack(model, tmp_path / "again")
    files = []
    for directory in (packed, tmp_path / "again"):
        for file in demo_tokenizer:
            shutil.copy(file, directory)
        files.append(tmp_path / f"{directory.name}.gguf")
        export(directory, files[-1], to="gguf:F16", pre="gpt-2")
    assert read_gguf(files[0])[1] == read_gguf(files[1])[1]


def test_biases_of_the_experts_of_gpt_oss(exported):
    """Gates and ups take turns in transformers."""
    model, _, tensors = exported("gpt_oss")
    layer = model.model.layers[1]
    both = layer.mlp.experts.gate_up_proj_bias.detach()
    stored = {
        "ffn_gate_exps": both[:, ::2], "ffn_up_exps": both[:, 1::2], "ffn_gate_inp": layer.mlp.router.bias,
        "ffn_down_exps": layer.mlp.experts.down_proj_bias, "attn_output": layer.self_attn.o_proj.bias,
    }  # fmt: skip
    for name, tensor in stored.items():
        assert torch.equal(values(tensors[f"blk.1.{name}.bias"]), tensor.detach()), name
    assert torch.equal(values(tensors["blk.1.attn_sinks.weight"]), layer.self_attn.sinks.detach())


def test_inputs_of_layers_of_gemma_4(exported):
    model, _, tensors = exported("gemma4_text, E")
    text = model.model
    assert torch.equal(values(tensors["per_layer_token_embd.weight"]), text.embed_tokens_per_layer.weight.detach())
    assert torch.equal(values(tensors["per_layer_model_proj.weight"]), text.per_layer_model_projection.weight.detach())
    assert torch.equal(values(tensors["per_layer_proj_norm.weight"]), text.per_layer_projection_norm.weight.detach())
    # The last three layers attend to what others have stored.
    assert {name.split(".")[1] for name in tensors if ".attn_k." in name} == {"0", "1", "2"}


def test_value_heads_of_linear_attention_take_turns(exported):
    """Heads 0 and 1 share the first key head, 2 and 3 the second; the file has 0, 2, 1, 3."""
    model, _, tensors = exported("qwen3_5_text")
    layer = model.model.layers[0].linear_attn

    def taken(rows, size):
        return torch.cat([rows[head * size : (head + 1) * size] for head in (0, 2, 1, 3)])

    q_and_k, v = layer.in_proj_qkv.weight.split([64, 64])
    assert torch.equal(values(tensors["blk.0.attn_qkv.weight"]), torch.cat([q_and_k, taken(v, 16)]))
    assert torch.equal(values(tensors["blk.0.ssm_out.weight"]), taken(layer.out_proj.weight.t(), 16).t())
    assert torch.equal(values(tensors["blk.0.attn_gate.weight"]), taken(layer.in_proj_z.weight, 16))
    assert torch.allclose(values(tensors["blk.0.ssm_a"]), -taken(layer.A_log, 1).exp())
    taps = values(tensors["blk.0.ssm_conv1d.weight"])
    assert taps.shape == (128, 4) and torch.equal(taps[64:], taken(layer.conv1d.weight.squeeze(1)[64:], 16))


def test_what_holds_a_key_head_after_another_is_torn_apart(exported):
    model, _, tensors = exported("qwen3_next")
    layer = model.model.layers[0].linear_attn
    heads = layer.in_proj_qkvz.weight.view(2, 96, 64)  # q, k, v and z of a key head: 16, 16, 32 and 32 rows
    q, k, v, z = (part.flatten(0, 1) for part in heads.split([16, 16, 32, 32], 1))
    assert torch.equal(values(tensors["blk.0.attn_qkv.weight"]), torch.cat([q, k, v]))
    assert torch.equal(values(tensors["blk.0.attn_gate.weight"]), z)
    gate = model.model.layers[0].mlp.shared_expert_gate.weight.flatten()
    assert torch.equal(values(tensors["blk.0.ffn_gate_inp_shexp.weight"]), gate)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("bitnet", {}, "computes SiLU where the model has ReLU²"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "multiplies scores by 0.1768, the model by 0.2041"),
        ("qwen3_5_text", {"linear_value_head_dim": 32}, "has keys and values of one size in its layers of linear"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "turns queries and keys in other layers"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "has layers with a window, the model none"),
        ("gemma", {"tie_word_embeddings": False}, "has no output head of its own"),
        ("qwen3_next", {"num_experts": 0}, "has experts, the model none"),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                }
            },
            "has no rotary settings of type 'default'",
        ),
        ("gemma4_text", {"layer_types": ["full_attention"] * 4}, "has layers with a window, the model none"),
        ("gemma4_text, E", {"vocab_size_per_layer_input": 8200}, "inputs of layers for each of 8192 tokens, the model"),
        (
            "gemma4_text, E",
            {"layer_types": FAMILIES["gemma4_text, E"]["layer_types"]},
            "lets layer 3 attend to the keys and values of another layer than 2",
        ),
        ("gpt_oss", {"swiglu_limit": 1.5}, "clips activations at 7, the model at 1.5"),
        ("gpt_oss", {"attention_bias": False}, "has biases of attention, the model none"),
        ("llama", {"rope_parameters": _UNROUNDED}, "rounds the bounds of yarn's ramp, the model does not"),
        ("helium", {}, "'helium' is not written by trirun"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(exported, tmp_path, family, change, reason):
    with pytest.raises(InputError, match=reason):
        exported(family, **change)
    assert not (tmp_path / "f.gguf").exists()


def test_the_ramp_of_gpt_oss_is_written_and_said(tmp_path, demo_tokenizer):
    """As every published model of the family has it, and llama.cpp's own converter writes it."""
    change = {"vocab_size": 8192} | FAMILIES["gpt_oss"] | AS_LLAMA_CPP["gpt_oss"] | {"rope_parameters": _UNROUNDED}
    _, _, packed = save_ternary("gpt_oss", change, tmp_path)
    for file in demo_tokenizer:
        shutil.copy(file, packed)
    (note,) = export(packed, tmp_path / "f.gguf", to="gguf:F16", pre="gpt-2").notes
    assert "rounds the bounds of yarn's ramp" in note
