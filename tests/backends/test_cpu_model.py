"""The native decoder against transformers' own modelling, for every family it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from trirun_kernels.decoder.cpu import Segment
from trirun_kernels.weights.names import embedding_names
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from tests.small_models import FAMILIES, SIZES, save_ternary
from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.cuda.weights import load_model
from trirun_cli.backends.registry import open_runner
from trirun_cli.checkpoint.model_dir import read_json
from trirun_cli.engine.scoring import ScoringModel
from trirun_cli.errors import InputError
from trirun_cli.models.description import UnsupportedModel, decoder_shape, description, longest_context
from trirun_cli.models.rotary import angles
from trirun_cli.workflows.pack import pack

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMAS = {
    "llama": ("llama", {}),
    "llama, mha, tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head_dim": ("llama", {"head_dim": 40}),
    "llama, llama3 rotation": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rotation": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, yarn rotation": ("llama", {"rope_parameters": YARN}),
}
MODELS = LLAMAS | {name: (name.split(",")[0], change) for name, change in FAMILIES.items()}


def save_packed(family, change, out):
    """A random ternary model of a family, and its packed checkpoint in ``out``."""
    model, _, packed = save_ternary(family, change, out)
    return model, packed


def change_config(directory, **change):
    file = directory / "config.json"
    file.write_text(json.dumps(read_json(file) | change))


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def rotary_angles(config, positions):
    found = description(config)
    return angles(found.rotary[0], found.shape.rotary_halves[0], positions)


def logits_of(decoder, tokens, **options):
    return torch.from_numpy(decoder.forward(tokens, **options))


def scoring_model(directory):
    return ScoringModel(open_runner(directory, device="cpu", scoring=True))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    """Of a prompt in pieces, which windows end within."""
    model, packed = save_packed(*MODELS[name], tmp_path)
    tokens = torch.randint(3, 96, (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        output = model(tokens.unsqueeze(0), output_hidden_states=True)
    expected, states = output.logits[0], output.hidden_states[-1][0]
    decoder = NativeDecoder(packed, kv_dtype="float32", int8_head=False, threads=2)
    found = logits_of(decoder, tokens, keep=200)
    # What 16-bit activations round is enlarged by the recurrence, and by a router after it: in float32 the reference of
    # the kernels differs from transformers by 8e-6 there.
    bound = 3e-3 if name in ("qwen3_next", "qwen3_5_moe_text") else 1e-3
    assert error(found, expected) < bound
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.97
    pieces = [(0, 150), (150, 199), (199, 200)]
    given = [decoder.states([Segment(0, first, last - first)], tokens[first:last]) for first, last in pieces]
    assert error(torch.from_numpy(np.concatenate(given)), states) < bound
    half = NativeDecoder(packed, threads=2, max_rows=48)
    every = logits_of(half, tokens, keep=200)
    assert error(every, expected) < 1e-2
    for keep in (1, 8, 9, 60, 104, 105):
        assert torch.equal(logits_of(half, tokens, keep=keep), every[-keep:])


def test_one_token_at_a_time(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    tokens = torch.randint(3, 96, (90,), generator=torch.Generator().manual_seed(1))
    every, lm = logits_of(NativeDecoder(packed, threads=2), tokens, keep=90), scoring_model(packed)
    assert lm.vocab_size == 96 and lm.max_positions == 256
    for _ in range(2):
        lm.reset()
        found = torch.cat([lm.forward(tokens[:40]), *(lm.forward(token.view(1)) for token in tokens[40:])])
        assert torch.equal(found, every[39:])
    lm.rewind(50)
    batch = lm.forward_batch([tokens[:30], tokens[:77]], [3, 1])
    assert torch.equal(batch[0], every[27:30]) and torch.equal(batch[1], every[76:77])
    assert torch.equal(lm.forward(tokens[50:60], last_only=False), every[50:60])


@pytest.mark.parametrize("differ", [False, True])
def test_tied_heads_are_those_that_are_equal(differ, tmp_path):
    """As transformers does: config.json may say that head and embedding are tied where the file holds two that differ,
    be it in the last byte alone."""
    _, packed = save_packed("llama", {"tie_word_embeddings": not differ}, tmp_path)
    change_config(packed, tie_word_embeddings=True)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 8 * differ
    save_file(tensors, file, {"format": "pt"})
    _, head = embedding_names(read_json(packed / "config.json"), SafetensorsDir(packed))
    assert head == ("lm_head.weight" if differ else "model.embed_tokens.weight")
    expected = AutoModelForCausalLM.from_pretrained(packed.parent / "model", dtype=torch.float32).eval()
    expected.lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"].float())
    tokens = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = expected(tokens.unsqueeze(0)).logits[0]
    found = logits_of(NativeDecoder(packed, kv_dtype="float32", int8_head=False, threads=1), tokens, keep=20)
    assert error(found, logits) < 1e-3
    on_gpu = load_model(packed, device=torch.device("cpu"))
    assert torch.equal(on_gpu.head.weight[:96].float(), tensors["lm_head.weight"].half().float())


def test_slots_are_independent_sequences(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, 96, (length,), generator=generator) for length in (50, 20))
    decoder = NativeDecoder(packed, slots=3, threads=2)
    alone = [logits_of(NativeDecoder(packed, threads=2), tokens) for tokens in (first, second)]
    decoder.forward(first[:-1], slot=0)
    decoder.forward(second[:-1], slot=2)
    batch = decoder.step([Segment(0, 49, 1), Segment(2, 19, 1)], [first[-1], second[-1]], [0, 1])
    assert torch.equal(torch.from_numpy(batch), torch.cat(alone))


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_a_copied_prefix_is_the_prefix(kv_dtype, tmp_path):
    _, packed = save_packed("llama", {"head_dim": 24}, tmp_path)
    tokens = torch.randint(3, 96, (100,), generator=torch.Generator().manual_seed(1))
    decoder = NativeDecoder(packed, slots=3, threads=2, kv_dtype=kv_dtype)
    expected = logits_of(decoder, tokens, slot=0)
    for length in (1, 63, 64, 65, 99):
        decoder.forward(tokens.flip(0), slot=2)
        decoder.native.copy_prefix(0, 2, length)
        assert torch.equal(logits_of(decoder, tokens[length:], slot=2, position=length), expected)
    with pytest.raises(ValueError, match="3 positions of slot 0 to 5"):
        decoder.native.copy_prefix(0, 5, 3)


def test_ternary_model_keeps_its_logits(shared, tmp_path):
    source = shared / "models" / "bookshelf-28m-ternary"
    pack(source, tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokens = torch.randint(3, 8192, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    found = logits_of(NativeDecoder(tmp_path / "packed", int8_head=False), tokens, keep=300)
    assert error(found, expected) < 2e-3


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotary_angles_equal_transformers(kind):
    parameters = {"linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}, "llama3": LLAMA3, "yarn": YARN}
    change = {"rope_parameters": parameters[kind]} if kind in parameters else {}
    config = AutoConfig.for_model("llama", **(SIZES | change))
    if kind == "default":
        expected, scaling = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16), 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    cosines, sines = map(torch.from_numpy, rotary_angles(config.to_dict(), 64))
    turned = torch.arange(64).unsqueeze(1) * expected
    assert torch.allclose(cosines, turned.cos() * scaling, atol=2e-5)
    assert torch.allclose(sines, turned.sin() * scaling, atol=2e-5)


def test_old_rotary_settings_are_read():
    base = SIZES | {"model_type": "llama"}
    old = {name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}
    old_config = base | {"rope_theta": 500000.0, "rope_scaling": old | {"type": "llama3"}}
    new, found = rotary_angles(base | {"rope_parameters": LLAMA3}, 64), rotary_angles(old_config, 64)
    assert np.array_equal(new[0], found[0]) and np.array_equal(new[1], found[1])
    assert not np.array_equal(new[0], rotary_angles(base, 64)[0])
    both = rotary_angles(old_config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64)
    assert np.array_equal(new[0], both[0]) and np.array_equal(new[1], both[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "of the family gpt_neox"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"num_key_value_heads": 3}, "4 heads over 3"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        decoder_shape(SIZES | {"model_type": "llama"} | change)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2", "model.layers.0.self_attn.k_proj.bias"), ("qwen3", "model.layers.1.self_attn.q_norm.weight")],
)
def test_a_norm_or_a_bias_of_other_layers_alone_is_not_left_out(tmp_path, family, name):
    _, packed = save_packed(family, {}, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    del tensors[name]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"no tensor {name}"):
        NativeDecoder(packed)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096, 4096]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, [4096, 4096]),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [None, 64]),
        ({"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": False}, [None, None]),
        ({"model_type": "qwen3", "sliding_window": 4096}, [None, None]),
        ({"model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"]}, [None, 4096]),
        ({"model_type": "gemma2", "sliding_window": 64}, [64, None]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [64, None]),
        ({"model_type": "cohere2", "sliding_window": 64}, [64, 64]),
    ],
)
def test_windows_of_layers(config, windows):
    config = SIZES | config | {"max_position_embeddings": 32768}
    assert list(decoder_shape(config).windows) == windows and longest_context(config) == 32768


def test_what_does_not_fit_is_refused(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    with pytest.raises(UnsupportedModel, match="300 positions; the model has 256"):
        NativeDecoder(packed, context=300)
    decoder = NativeDecoder(packed, context=100)
    with pytest.raises(ValueError, match="5 tokens at position 96 of a context of 100"):
        decoder.forward(torch.arange(5), position=96)
    with pytest.raises(ValueError, match="0 tokens"):
        decoder.forward(torch.arange(0))


def test_no_torch_is_needed(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    code = (
        "import sys; from trirun_cli.backends.cpu.decoder import NativeDecoder; "
        "logits = NativeDecoder(sys.argv[1], threads=2).forward([3, 4, 5]); "
        "assert 'torch' not in sys.modules; print(int(logits.argmax()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, packed], capture_output=True, text=True, check=True, env=environment
    )
    assert int(done.stdout) == NativeDecoder(packed, threads=2).forward([3, 4, 5]).argmax()


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_refused(lost, tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(InputError, match=lost):
        NativeDecoder(packed)


def test_a_tampered_shape_is_refused(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:1].clone()
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight is I32 \[1, .* the format says"):
        NativeDecoder(packed)


def test_a_truncated_file_is_refused(tmp_path):
    _, packed = save_packed("llama", {}, tmp_path)
    config = json.loads((packed / "config.json").read_text())
    file = next(packed.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(InputError):
        NativeDecoder(packed)
    assert config["quantization_config"]["quant_method"] == "trirun"
