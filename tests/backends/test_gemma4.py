"""Gemma 4: what config.json says of its two kinds of layers, and what the native decoder leaves to transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_kernels.decoder.shape import FeedForward, Mixture, Routing

from tests.small_models import FAMILIES, SIZES, open_engine, save_ternary
from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.checkpoint.verify import verify_modules
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.errors import InputError
from trirun_cli.models.description import UnsupportedModel, description, gpu_decoder_shape
from trirun_cli.models.linears import linear_layers
from trirun_cli.models.rotary import angles
from trirun_cli.workflows.pack import pack

PUBLISHED = SIZES | FAMILIES["gemma4_text"] | {"model_type": "gemma4_text"}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 96}


def test_a_published_config_says_what_a_saved_one_says():
    saved = json.loads(AutoConfig.for_model(**PUBLISHED).to_json_string())
    assert "per_layer_config" in saved and "global_head_dim" not in saved
    found = description(PUBLISHED)
    assert found == description(saved)
    sizes = [(m.head_dim, m.kv_heads, m.window, m.tied_values, m.rotary_half) for m in found.shape.attentions]
    assert sizes == [(32, 2, 24, False, 16), (64, 1, None, True, 32)] * 2
    assert {mixer.scale for mixer in found.shape.attentions} == {1.0}


def test_the_last_layer_sees_everything():
    config = PUBLISHED | {"layer_types": None, "num_hidden_layers": 8}
    assert description(config).shape.windows == (*[24] * 5, None, 24, None)
    assert description(config).shape == description(json.loads(AutoConfig.for_model(**config).to_json_string())).shape


def test_only_a_part_of_the_pairs_turns():
    rotary = description(PUBLISHED).rotary[1]
    cosines, sines = angles(rotary, 32, 5)
    turned = 1e6 ** -(np.arange(8) / 32)
    assert np.allclose(cosines[:, :8], np.cos(np.outer(np.arange(5), turned)), atol=1e-6)
    assert (cosines[:, 8:] == 1).all() and (sines[:, 8:] == 0).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size_per_layer_input": None}, None),
        ({"hidden_size_per_layer_input": 16}, "an embedding for every layer"),
        ({"num_kv_shared_layers": 2}, "layers that share keys and values"),
        (EXPERTS | {"top_k_experts": 9}, "routing: .* is not one that the kernels know"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"use_bidirectional_attention": "vision"}, None),
        ({"layer_types": ["chunked_attention"] * 4}, "layers of the type 'chunked_attention'"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "layers with a sliding_window of their own"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "heads of several sizes"),
        ({"num_global_key_value_heads": 3}, "4 heads over 3 key-value heads"),
    ],
)
def test_what_is_not_computed_is_refused(change, reason):
    if reason is None:
        assert description(PUBLISHED | change).shape == description(PUBLISHED).shape
        return
    with pytest.raises(UnsupportedModel, match=reason):
        description(PUBLISHED | change)


def test_an_embedding_for_every_layer_is_what_a_config_has_that_says_nothing():
    config = {name: value for name, value in PUBLISHED.items() if name != "hidden_size_per_layer_input"}
    with pytest.raises(UnsupportedModel, match="an embedding for every layer"):
        description(config)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"sliding_attention": {}}},
        {"global_head_dim": 0},
        {"per_layer_config": {"1": {"head_dim": -1}}},
        {"per_layer_config": [1]},
        {"sliding_window": "x"},
        {"enable_moe_block": True},
        EXPERTS | {"top_k_experts": 0},
        EXPERTS | {"num_experts": 1_000_000},
        EXPERTS | {"moe_intermediate_size": None},
    ],
)
def test_a_damaged_config_is_named(change):
    with pytest.raises(InputError, match=r"config\.json"):
        description(PUBLISHED | change)


def test_keys_are_read_once_where_they_are_values_too(tmp_path):
    model, _, packed = save_ternary("gemma4_text", FAMILIES["gemma4_text"], tmp_path)
    decoder = NativeDecoder(packed, kv_dtype="float32", int8_head=False, threads=2)
    tokens = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    # A prompt, and the same one token after another.
    whole = torch.from_numpy(decoder.forward(tokens, keep=60))
    single = [torch.from_numpy(decoder.forward(tokens[i : i + 1], position=i)) for i in range(60)]
    assert torch.equal(whole, torch.cat([each.reshape(1, -1) for each in single]))
    assert (whole - expected).norm() / expected.norm() < 1e-3


def test_experts_are_beside_the_dense_part():
    config = PUBLISHED | EXPERTS
    found = description(config)
    assert found == description(json.loads(AutoConfig.for_model(**config).to_json_string()))
    layer = found.shape.layers[1]
    assert layer.feed_forward == FeedForward(160, "gelu_tanh")
    assert layer.mixture == Mixture(Routing(8, 3), 96, "gelu_tanh")
    assert {"mlp_norm", "shared_norm", "shared_post_norm", "experts_post_norm", "mlp_post_norm"} < {*layer.vectors}
    with pytest.raises(UnsupportedModel, match="experts and a feed-forward part beside them"):
        gpu_decoder_shape(config)
    # Settings of other families mean nothing here.
    assert description(config | {"num_experts_per_tok": 5, "routed_scaling_factor": 2.0, "n_group": 2}) == found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model with experts, its directory, and its packed checkpoint."""
    return save_ternary("gemma4_text", FAMILIES["gemma4_text, experts"], tmp_path_factory.mktemp("mixed"))


def test_a_router_may_be_packed_or_not(mixed, tmp_path):
    model, source, packed = mixed
    linears = linear_layers(ModelDir(packed))
    assert linears == linear_modules(meta_model(packed))
    assert linears["model.layers.0.router.proj"] == (8, 64) and linears["model.layers.3.experts.7.down"] == (64, 96)
    pack(source, tmp_path / "kept", keep=r"router\.proj")
    tokens = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    found = []
    for path in (packed, tmp_path / "kept"):
        checkpoint = Checkpoint(path)
        assert ("model.layers.0.router.proj" in checkpoint.modules) == (path == packed)
        assert not any(problem for _, problem in verify_modules(checkpoint, linears, ModelDir(source)))
        decoder = NativeDecoder(path, kv_dtype="float32", int8_head=False, threads=2)
        found.append(torch.from_numpy(decoder.forward(tokens, keep=60)))
        single = [torch.from_numpy(decoder.forward(tokens[i : i + 1], position=i)) for i in range(60)]
        assert torch.equal(found[-1], torch.cat([each.reshape(1, -1) for each in single]))
    assert torch.equal(*found)
    assert (found[0] - expected).norm() / expected.norm() < 1e-3


def test_experts_write_what_transformers_writes(mixed):
    model, _, packed = mixed
    prompt = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, 40:].tolist()
    engine = open_engine(packed, device="cpu", slots=2, exact=True)
    assert engine.name.startswith("native decoder")
    params = SamplingParams(max_tokens=24, ignore_stop_ids=True)
    request = Request("a", tuple(prompt[0].tolist()), params)
    assert [token.id for event in engine.generate([request]) for token in event.tokens] == expected


@pytest.mark.parametrize(
    ("name", "change", "error", "reason"),
    [
        ("pre_feedforward_layernorm_2.weight", lambda x: x.index_fill(0, torch.tensor([5]), 0), UnsupportedModel, "0"),
        ("router.scale", lambda x: x[1:], InputError, r"router\.proj\.weight has shape \[8, 64\]"),
        ("router.per_expert_scale", lambda x: x[1:], InputError, r"expert_scale must be float32 \[8\]"),
        ("router.per_expert_scale", None, UnsupportedModel, r"no tensor .*layers\.2\.router\.per_expert_scale"),
        ("router.proj.weight", None, UnsupportedModel, r"no tensor .*layers\.2\.router\.proj\.weight"),
        ("post_feedforward_layernorm_1.weight", None, UnsupportedModel, "no tensor .*post_feedforward_layernorm_1"),
    ],
)
def test_a_router_that_cannot_be_folded_is_named(mixed, tmp_path, name, change, error, reason):
    shutil.copytree(mixed[2], tmp_path / "packed")
    file, name = tmp_path / "packed" / "model.safetensors", f"model.layers.2.{name}"
    tensors = load_file(file)
    tensors |= {} if change is None else {name: change(tensors[name]).contiguous()}
    if change is None:
        tensors = {key: value for key, value in tensors.items() if not key.startswith(name)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error, match=reason):
        NativeDecoder(tmp_path / "packed", threads=1)
