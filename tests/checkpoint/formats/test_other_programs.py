"""What trirun exports, run or read by the programs that it is for, where they are installed: xllamacpp (llama.cpp), the
package gguf, compressed-tensors, mlx_lm. Continuous integration has none of them."""

import json

import numpy as np
import pytest
import torch

from tests.checkpoint.formats.gguf_writer import DATA
from tests.small_models import save_ternary
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
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
