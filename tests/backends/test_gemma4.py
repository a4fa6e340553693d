"""Gemma 4: what config.json says of its two kinds of layers, and what the native decoder leaves to transformers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.small_models import FAMILIES, SIZES, save_ternary
from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.errors import InputError
from trirun_cli.models.description import UnsupportedModel, description
from trirun_cli.models.rotary import angles

PUBLISHED = SIZES | FAMILIES["gemma4_text"] | {"model_type": "gemma4_text"}


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
        ({"enable_moe_block": True}, "experts beside a feed-forward part"),
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
