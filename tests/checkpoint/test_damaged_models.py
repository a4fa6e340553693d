"""Model directories that are damaged or contradict themselves: one clear line that says where."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM
from trirun_kernels.weights.safetensors_file import TensorFileError

from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.errors import InputError, explain
from trirun_cli.models.pretrained import load_pretrained


def one_line(err):
    return [line for line in err.splitlines() if line.startswith("error:")]


def test_broken_config(trirun, packed, copy_of):
    damaged = copy_of(packed)
    (damaged / "config.json").write_text("{")
    code, _, err = trirun("inspect", damaged)
    assert code == 3 and "not valid JSON" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "x"}, "hidden_size is 'x', not a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"head_dim": 2**39}, "heads of 549755813888, above 65536"),
        ({"rope_parameters": {"partial_rotary_factor": 2**20}}, "partial_rotary_factor is 1048576, above 1"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"rms_norm_eps": []}, "rms_norm_eps is []"),
        ({"rope_parameters": "yarn"}, "rotary settings are 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "has no low_freq_factor"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"model_type": ["llama"]}, "model"),
        ({"quantization_config": "trirun"}, "quantized by 'unknown'"),
    ],
)
def test_sizes_that_are_none(trirun, packed, copy_of, change, message):
    damaged = copy_of(packed)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | change))
    code, out, err = trirun("generate", "-c", damaged, "-p", "x", "--ctx", "8", "--device", "cpu")
    assert code == 3 and out == "" and len(one_line(err)) == 1 and message in err


def test_damaged_weights_are_input_errors(packed, copy_of):
    damaged = copy_of(packed)
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors is truncated"):
        ModelDir(damaged)
    # What is found out later, when a file is read, is the same to the user.
    known = explain(TensorFileError("a is truncated", "copy it again"))
    assert isinstance(known, InputError) and (str(known), known.fix) == ("a is truncated", "copy it again")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_a_tensor_that_is_not_there(trirun, packed, copy_of, name):
    damaged = copy_of(packed)
    tensors = load_file(damaged / "model.safetensors")
    del tensors[name]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    code, _, err = trirun("generate", "-c", damaged, "-p", "x", "--device", "cpu")
    assert code == 3 and len(one_line(err)) == 1 and f"holds no {name}" in err


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(UP), f"holds no {UP}"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name], "and 7 more tensors"),
        (lambda tensors: tensors.update({UP: tensors[UP][:100].clone()}), "[100, 128], config.json says [192, 128]"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "-p", "x", "-q", "-c"), ("eval", "-c")])
def test_nothing_is_made_up_in_the_place_of_a_tensor(trirun, plain_model, copy_of, command, change, message):
    damaged = copy_of(plain_model)
    change_tensors(damaged, change)
    code, out, err = trirun(*command, damaged, "--device", "cpu")
    assert code == 3 and out == "" and message in err and len(err.strip().splitlines()) == 1


def test_nothing_is_made_up_beside_packed_weights(trirun, packed, copy_of):
    damaged = copy_of(packed)
    change_tensors(damaged, lambda tensors: tensors.pop(NORM))
    code, _, err = trirun("generate", "-c", damaged, "-p", "x", "--device", "cpu", "--engine", "transformers")
    assert code == 3 and f"holds no {NORM}" in err and len(err.strip().splitlines()) == 1


def test_types_that_transformers_alone_reads(trirun, packed, copy_of):
    wide = copy_of(packed)
    change_tensors(wide, lambda tensors: tensors.update({NORM: tensors[NORM].double()}))
    options = ("generate", "-c", wide, "-p", "x", "-n", 1, "--device", "cpu")
    code, _, err = trirun(*options)
    assert code == 0 and "on transformers" in err
    code, _, err = trirun(*options, "--engine", "native")
    assert code == 3 and len(one_line(err)) == 1 and f"{NORM} is F64, not one of" in err


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("options", [(), ("--temperature", 1), ("--engine", "transformers", "--temperature", 1)])
def test_a_weight_that_is_infinite(trirun, packed, copy_of, options):
    damaged = copy_of(packed)
    change_tensors(damaged, lambda tensors: tensors[NORM][3:4].fill_(torch.inf))
    code, out, err = trirun("generate", "-c", damaged, "-p", "x", "-q", "--device", "cpu", *options)
    assert code == 3 and out == "x\n" and err.startswith("error: the model's logits are not finite")
    (damaged / "prompts.txt").write_text("a\nb\n")
    code, _, err = trirun("generate", "-c", damaged, "--prompts-file", damaged / "prompts.txt", "-q", *options)
    assert code == 3 and len(one_line(err)) == 1


def test_experts_that_are_incomplete(tmp_path):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 16)
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_local_experts"), 2)
    MixtralForCausalLM(MixtralConfig(**sizes, **counts)).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(next(name for name in tensors if "experts.1" in name)))
    with pytest.raises(InputError, match="as those of experts, differ in number or shape"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "content",
    ['{"weight_map": {"a": 3}}', '{"weight_map": {}}', "[]", '{"weight_map": {"a": "../copy/model.safetensors"}}'],
)
@pytest.mark.parametrize("command", [("inspect",), ("generate", "-p", "x", "-c")])
def test_an_index_that_is_none(trirun, packed, copy_of, command, content):
    damaged = copy_of(packed)
    (damaged / "model.safetensors.index.json").write_text(content)
    code, _, err = trirun(*command, damaged)
    assert code == 3 and len(one_line(err)) == 1 and "model.safetensors.index.json" in err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"do_sample": True, "top_p": []}, "top_p is []"),
        ({"do_sample": True, "top_k": 2.5}, "top_k is 2.5"),
    ],
)
def test_settings_of_generation_that_are_none(trirun, packed, copy_of, settings, message):
    damaged = copy_of(packed)
    (damaged / "generation_config.json").write_text(json.dumps(settings))
    code, out, err = trirun("generate", "-c", damaged, "-p", "x")
    assert code == 3 and out == "" and len(one_line(err)) == 1 and message in err


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", 5])
def test_chat_templates_that_fail(trirun, packed, copy_of, template):
    damaged = copy_of(packed)
    config = json.loads((damaged / "tokenizer_config.json").read_text())
    (damaged / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    code, out, err = trirun("generate", "-c", damaged, "-p", "x")
    assert code == 3 and out == "" and len(one_line(err)) == 1 and "chat template fails" in err


def test_unknown_architecture(trirun, plain_model, copy_of, tmp_path):
    damaged = copy_of(plain_model)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    code, _, err = trirun("pack", damaged, "--out", tmp_path / "T")
    assert code == 3 and len(one_line(err)) == 1 and "nonesuch" in err


@pytest.mark.parametrize("keep", [0.5, 0.999, 4 / 1e6])
@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_truncated_safetensors(trirun, packed, copy_of, command, keep):
    damaged = copy_of(packed)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    arguments = [damaged] if command == "inspect" else ["--checkpoint", damaged, "--prompt", "x"]
    code, _, err = trirun(command, *arguments)
    assert code == 3 and len(one_line(err)) == 1 and "model.safetensors is truncated" in err


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("generate", "-p", "x", "-c"), ("eval", "-c")])
def test_newer_format_version(trirun, packed, copy_of, command):
    code, _, err = trirun(*command, copy_of(packed, format_version=3))
    assert code == 3 and "format version 3" in err and "upgrade trirun" in err


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"format_version": "1"}, "format_version is '1'"),
        ({"layout": "rows"}, "is not 2-bit tile64"),
        ({"bits": 4}, "is not 2-bit tile64"),
        ({"group_size": 48}, "group_size=48"),
        ({"group_size": 64}, "model.layers.0.mlp.down_proj.weight_scale is F16"),
        ({"zero": None}, "weight_zero is missing"),
        ({"activation_bits": 4}, "activation_bits is 4"),
        ({"quant_method": "gptq"}, "has no packed linear layer"),
        ({"padded": []}, "padded is []"),
        ({"overrides": None}, "overrides is None"),
        ({"padded": {"model.layers.0.mlp.down_proj": [1, 2]}}, "model.layers.0.mlp.down_proj"),
        ({"zero": 1e308}, "zero=1e+308 is no number"),
        ({"zero": True}, "zero=True is no number"),
        ({"group_size": 64.0}, "group_size=64.0 is not one of"),
        ({"embeddings": [[]]}, "embeddings is [[]], not names"),
        ({"padded": {"model.layers.0.mlp.down_proj": 1}}, "model.layers.0.mlp.down_proj"),
        ({"padded": {"model.layers.0.mlp.down_proj": [128.0, 192]}}, "its true shape is [128.0, 192]"),
    ],
)
def test_contradicting_format(trirun, packed, copy_of, section, message):
    damaged = copy_of(packed, **section)
    code, _, err = trirun("inspect", damaged)
    assert code == 3 and len(one_line(err)) == 1 and message in err
    code, out, err = trirun("generate", "-c", damaged, "-p", "x")
    assert code == 3 and len(one_line(err)) == 1 and out == ""


def test_tampered_shapes(trirun, packed, copy_of):
    damaged = copy_of(packed)
    tensors = load_file(damaged / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:, :2].contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    code, _, err = trirun("inspect", damaged)
    assert code == 3 and f"{name} is" in err
    code, _, err = trirun("generate", "--checkpoint", damaged, "--prompt", "x")
    assert code == 3 and len(one_line(err)) == 1 and f"{name} is I32 [2, 2, 128], the format says" in err


def test_a_flipped_bit_fails_verification(trirun, packed, copy_of):
    damaged = copy_of(packed)
    file = damaged / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    code, out, err = trirun("verify", damaged, "--json")
    document = json.loads(out)
    assert code == 6 and not document["ok"] and "SHA-256 differs" in document["problems"][0]["problem"]
    assert "checks failed" in err


@pytest.mark.parametrize("content", [b"files: 5", b"files: [a]", b"name: \xff"])
def test_checksums_that_are_none(trirun, packed, copy_of, content):
    damaged = copy_of(packed)
    (damaged / "SHA256SUMS").unlink()
    (damaged / "trirun_recipe.yaml").write_bytes(content)
    code, _, err = trirun("verify", damaged)
    assert code == 3 and len(one_line(err)) == 1 and "trirun_recipe.yaml" in err


def test_verify_against_another_model_names_the_difference(trirun, packed, plain_model, ternary_model):
    assert trirun("verify", packed, "--against", ternary_model)[0] == 0
    code, out, _ = trirun("verify", packed, "--against", plain_model)
    assert code == 6 and "differ from the original, the first at" in out


def test_infinite_scales_fail_verification(trirun, packed, copy_of):
    damaged = copy_of(packed)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = float("inf")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = trirun("verify", damaged)
    assert code == 6 and "1 values that are not finite" in out
