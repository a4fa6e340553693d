"""Gemma 4: what config.json says of its two kinds of layers, and what the native decoder leaves to transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_kernels.decoder.shape import FeedForward, LayerInputs, Mixture, Routing

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
E = SIZES | FAMILIES["gemma4_text, E"] | {"model_type": "gemma4_text"}
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
    # With ten and more, layers are numbered "05" in what is saved.
    for layers, windows in ((8, (*[24] * 5, None, 24, None)), (12, (*[24] * 5, None, *[24] * 5, None))):
        config = PUBLISHED | {"layer_types": None, "num_hidden_layers": layers}
        saved = json.loads(AutoConfig.for_model(**config).to_json_string())
        assert description(config).shape.windows == windows and description(saved).shape == description(config).shape


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
        ({"hidden_size_per_layer_input": 24}, "inputs of layers of 24 elements, made for 262144 tokens"),
        (
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 90},
            "inputs of layers of 16 elements, made for 90",
        ),
        ({"num_kv_shared_layers": 0}, None),
        (EXPERTS | {"top_k_experts": 9}, "routing: .* is not one that the kernels know"),
        (
            EXPERTS | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "experts and feed-forward parts of several sizes",
        ),
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


def test_layers_have_inputs_where_a_config_says_nothing():
    config = {name: value for name, value in PUBLISHED.items() if name != "hidden_size_per_layer_input"}
    found = description(config).shape
    assert found.inputs == LayerInputs(256, 262144, 16.0, 0.125, 0.5**0.5)
    assert [layer.own_input for layer in found.layers] == [256] * 4


def test_the_last_layers_attend_to_what_the_last_of_their_kind_has_stored():
    layers = description(E).shape.layers
    assert [layer.mixer.shared_with for layer in layers] == [None, None, None, 2, 2, 1]
    assert [layer.feed_forward.size for layer in layers] == [160] * 3 + [320] * 3
    assert [set(layer.mixer.linear_sizes(64)) for layer in layers] == [set("qkvo")] * 3 + [set("qo")] * 3
    assert {"k_norm", "v_norm"}.isdisjoint(layers[3].vectors) and "k_norm" in layers[2].vectors
    narrow = description(E | {"use_double_wide_mlp": False}).shape.layers
    assert {layer.feed_forward.size for layer in narrow} == {160}
    assert description(json.loads(AutoConfig.for_model(**E).to_json_string())).shape == description(E).shape


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"sliding_attention": {}}},
        {"global_head_dim": 0},
        {"per_layer_config": {"1": {"head_dim": -1}}},
        {"per_layer_config": [1]},
        {"sliding_window": "x"},
        {"num_kv_shared_layers": -1},
        {"num_kv_shared_layers": 3},
        {"num_kv_shared_layers": 9},
        {"num_kv_shared_layers": 2, "per_layer_config": {"3": {"head_dim": 64}}},
        {"hidden_size_per_layer_input": "16"},
        {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": None},
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


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """A model of the smallest ones' kind, with caches of windows shorter than its context; and its packed directory."""
    change = FAMILIES["gemma4_text, E"] | {"max_position_embeddings": 512}
    model, _, packed = save_ternary("gemma4_text", change, tmp_path_factory.mktemp("smallest"))
    return model, packed


@pytest.mark.parametrize("rows", [1, 30, 192])
def test_logits_are_those_of_transformers_however_a_text_is_cut(smallest, rows):
    model, packed = smallest
    tokens = torch.randint(3, 96, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    decoder = NativeDecoder(packed, kv_dtype="float32", int8_head=False, threads=2, max_rows=rows, slots=2)
    assert not decoder.native.can_rewind
    for slot in (1, 0):
        found = torch.from_numpy(decoder.forward(tokens, keep=300, slot=slot))
        single = [torch.from_numpy(decoder.forward(tokens[i : i + 1], position=i, slot=slot)) for i in range(300)]
        assert torch.equal(found, torch.cat(single))
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-3


@pytest.mark.parametrize("keep", ["per_layer_model_projection", None])
def test_the_table_stays_in_its_file_and_the_projection_is_packed_or_not(tmp_path, smallest, keep):
    model, packed = smallest
    source = packed.parent / "model"
    pack(source, tmp_path / "packed", keep=keep)
    tensors = ModelDir(tmp_path / "packed")
    assert ("model.per_layer_model_projection.weight_scale" in tensors) == (keep is None)
    assert tensors["model.embed_tokens_per_layer.weight"].dtype == "F32"
    decoder = NativeDecoder(tmp_path / "packed", kv_dtype="float32", int8_head=False, threads=1)
    tokens = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    found = torch.from_numpy(decoder.forward(tokens, keep=60))
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-3


def test_a_conversation_goes_on_and_prefixes_are_shared(tmp_path):
    """Caches are as long as the context here: what a slot holds serves others, for all layers."""
    model, _, packed = save_ternary("gemma4_text", FAMILIES["gemma4_text, E"], tmp_path)
    engine, generator = open_engine(packed, device="cpu", slots=3, exact=True), torch.Generator().manual_seed(3)
    shared, *ends = (torch.randint(3, 96, (count,), generator=generator).tolist() for count in (90, 1, 20, 40, 7, 30))

    def run(prompts):
        params, found = SamplingParams(max_tokens=20, ignore_stop_ids=True), [[] for _ in prompts]
        for event in engine.generate([Request(str(i), tuple(each), params) for i, each in enumerate(prompts)]):
            found[int(event.request_id)] += [token.id for token in event.tokens]
        return found

    # More sequences than slots, twice: the second time they go on.
    prompts = [shared + end for end in ends]
    for _ in range(2):
        found = run(prompts)
        for prompt, tokens in zip(prompts, found, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == tokens
        assert engine.stats.reused_tokens > 0
        prompts = [[*prompt, *tokens, 5] for prompt, tokens in zip(prompts, found, strict=True)]


def test_experts_are_beside_the_dense_part():
    config = PUBLISHED | EXPERTS
    found = description(config)
    assert found == description(json.loads(AutoConfig.for_model(**config).to_json_string()))
    layer = found.shape.layers[1]
    assert layer.feed_forward == FeedForward(160, "gelu_tanh")
    assert layer.mixture == Mixture(Routing(8, 3), 96, "gelu_tanh")
    assert {"mlp_norm", "shared_norm", "shared_post_norm", "experts_post_norm", "mlp_post_norm"} < {*layer.vectors}
    assert gpu_decoder_shape(config) == found.shape
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
