"""What trirun exports, run or read by the programs that it is for, where they are installed: xllamacpp and llama_cpp
(llama.cpp), the package gguf, compressed-tensors, mlx_lm. Continuous integration has none of them."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.formats.gguf_writer import DATA
from tests.small_models import AS_LLAMA_CPP, FAMILIES, save_ternary
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
from trirun_cli.checkpoint.formats.gguf.targets import TARGETS
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

MODELS = json.loads((DATA / "gguf_expected.json").read_text())["models"]


# Blocks of TQ2_0 and TQ1_0 hold 256 columns with one scale, which the weights of the first file do not have.
EXPORTS = [(name, to) for name in MODELS for to in ("gguf:Q2_0", "gguf:F16")]
EXPORTS += [("tiny-qwen3-TQ2_0", to) for to in ("gguf:TQ2_0", "gguf:TQ1_0")]


@pytest.fixture
def exported(tmp_path):
    """``exported(name, to)``: a file of llama.cpp's, packed and written as ``to``; and the first, read."""

    def make(name, to):
        pack(DATA / f"{name}.gguf", tmp_path / "T")
        out = tmp_path / ("again.gguf" if to.startswith("gguf") else "again")
        export(tmp_path / "T", out, to=to)
        return out, GgufModel(DATA / f"{name}.gguf")

    return make


@pytest.mark.parametrize(("name", "to"), EXPORTS)
def test_llama_cpp_generates_the_same_from_the_export(library, exported, name, to):
    xllamacpp = library("xllamacpp")
    (path, source), expected = exported(name, to), MODELS[name]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 64, 1, False
    wanted = {"prompt": expected["prompt"], "n_predict": 6, "temperature": 0, "ignore_eos": True}
    answer = xllamacpp.Server(params).handle_completions(wanted)
    # A tokenizer's text of the tokens before, and of all: a piece may begin with a space that a text drops.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    before, whole = (tokenizer.decode(ids, skip_special_tokens=False)
                     for ids in (expected["prompt"], expected["prompt"] + expected["greedy"]))  # fmt: skip
    assert answer["choices"][0]["text"] == whole.removeprefix(before)


# llama.cpp's model of each of these, with settings that make its parts matter; see tests/small_models.py.
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
_WRITTEN = [
    name for name in FAMILIES if name.partition(",")[0] in TARGETS and not name.endswith(("windows", "no experts"))
]
_MORE: dict[str, dict[str, Any]] = {
    "llama, yarn": {"rope_parameters": _YARN},
    "llama, yarn with a factor": {"rope_parameters": _YARN | {"attention_factor": 0.7, "beta_fast": 16}},
    "llama, llama3": {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "phi3, longrope": {
        "num_key_value_heads": 4, "intermediate_size": 192, "original_max_position_embeddings": 256,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.2, 1.5, 1.9, 2.5, 3, 3.5, 4],
            "long_factor": [2.0, 2.5, 3, 4, 5, 6, 7, 8], "factor": 4.0,
        },
    },
    "bitnet, SiLU": {"hidden_act": "silu", "tie_word_embeddings": True},
    "gemma3_text, linear": FAMILIES["gemma3_text"] | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in (*_WRITTEN, *_MORE) if name != "bitnet"])
def test_llama_cpp_computes_what_transformers_does(library, tmp_path, demo_tokenizer, name):
    llama_cpp = library("llama_cpp")
    family = name.partition(",")[0]
    change = (_MORE.get(name) or FAMILIES[name]) | (AS_LLAMA_CPP.get(name) or AS_LLAMA_CPP.get(family, {}))
    model, _, packed = save_ternary(family, {"vocab_size": 8192} | change, tmp_path)
    for file in demo_tokenizer:
        shutil.copy(file, packed)
    export(packed, tmp_path / "f.gguf", to="gguf:F16", pre="gpt-2")
    # Families whose windows llama.cpp does not have are written with a context of one.
    tokens = list(range(3, 60 if TARGETS[family].windows else 27))
    theirs = llama_cpp.Llama(str(tmp_path / "f.gguf"), n_ctx=64, logits_all=True, n_threads=1, verbose=False)
    theirs.eval(tokens)
    with torch.inference_mode():
        ours = model(torch.tensor([tokens])).logits[0].numpy()
    found = np.array(theirs.scores[: len(tokens)])
    # float16 weights, keys and values there; a part that is computed otherwise differs by far more. The median: of a
    # mixture some row has two experts that are nearly equal.
    assert np.median(np.linalg.norm(found - ours, axis=1) / np.linalg.norm(ours, axis=1)) < 0.003
    theirs.close()


@pytest.mark.parametrize(("name", "to"), [(name, to) for name, to in EXPORTS if to != "gguf:Q2_0"])
def test_the_package_gguf_reads_the_values(library, exported, name, to):
    gguf = library("gguf")
    path, source = exported(name, to)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part in ("ffn_up", "ffn_down", "attn_v"):
        tensor = stored[f"blk.1.{part}.weight"]
        found = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        ours = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}[part]
        assert np.array_equal(found, source.tensor(f"model.layers.1.{ours}.weight").float().numpy())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_runs_the_compressed_tensors_export(library, exported, name):
    library("compressed_tensors")
    from transformers import AutoModelForCausalLM

    (path, _), expected = exported(name, "compressed-tensors"), MODELS[name]
    model, ids = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), list(expected["prompt"])
    for _ in expected["greedy"]:
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert ids[len(expected["prompt"]) :] == expected["greedy"]


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "qwen3", "llama"])
def test_mlx_runs_the_mlx_export(library, tmp_path, family):
    mx = library("mlx.core")
    load_model = library("mlx_lm.utils").load_model
    experts = {} if family == "qwen3" else {"num_local_experts" if family == "mixtral" else "num_experts": 4}
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 128, "head_dim": 64}
    sizes |= {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
    # Apart from mlx_lm's own base of the angles, and with frequencies that are scaled.
    rotary = {"rope_theta": 500.0} | ({"rope_type": "linear", "factor": 2.0} if family == "llama" else {})
    sizes |= {"rope_parameters": rotary if family == "llama" else rotary | {"rope_type": "default"}}
    model, _, packed = save_ternary(family, sizes | experts, tmp_path)
    export(packed, tmp_path / "M", to="mlx")
    loaded, _ = load_model(tmp_path / "M")
    loaded.set_dtype(mx.float32)
    tokens = list(range(3, 40))
    found = np.array(loaded(mx.array([tokens])).astype(mx.float32))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits.numpy()
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
