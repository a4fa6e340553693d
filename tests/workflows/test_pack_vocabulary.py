"""Ternary embeddings and output heads: packed without loss, tied or not, and run so by every backend."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from trirun_kernels import dequantize
from trirun_kernels.gemm.embedding import Int2Embedding
from trirun_kernels.gemm.linear import Int2Linear

from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.cuda.weights import load_model
from trirun_cli.backends.registry import open_runner
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.integrations.transformers import load
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

# Two n tiles of the vocabulary are padded by 6 rows.
VOCAB = 8250
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
TOKENS = [5, 8249, 77, 4000, 5, 63, 64, 8191]


def ternary_vocabulary(to_ternary):
    """A change of a model: its embedding and head, which may be one, get a scale per 64 columns."""

    def change(model):
        to_ternary(model)
        for module in {model.get_input_embeddings(), model.get_output_embeddings()}:
            n, k = module.weight.shape
            scales = (torch.rand(n, k // 64) + 0.5).mul(k**-0.5).half().repeat_interleave(64, 1)
            module.weight.data.copy_(torch.randint(-1, 2, (n, k)).half() * scales)

    return change


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "apart"])
def source(request, save_llama, to_ternary):
    return save_llama(ternary_vocabulary(to_ternary), vocab_size=VOCAB, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "T"
    pack(source, out)
    return out


@pytest.fixture(scope="module")
def expected(source):
    """float32 logits [tokens, vocab] of transformers from the original."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def close(found, expected):
    return (torch.as_tensor(found) - expected).norm() <= 2e-3 * expected.norm()


def test_they_are_stored_packed_and_equal_the_original(source, made, trirun):
    opened = Checkpoint(made)
    tied = opened.config["tie_word_embeddings"]
    vocabulary = {EMBEDDING} if tied else {EMBEDDING, HEAD}
    assert vocabulary == {name for name in opened.modules if "layers" not in name}
    assert opened.format.embeddings == [EMBEDDING] and opened.format.to_dict()["format_version"] == 2
    assert opened.shape(EMBEDDING) == (VOCAB, 128) and opened[EMBEDDING + ".weight"].dtype == "I32"
    assert opened.format.modules_to_not_convert == ([HEAD] if tied else [])
    state = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).state_dict()
    for name in vocabulary:
        assert torch.equal(dequantize(opened.packed(name), torch.float16), state[name + ".weight"])
    assert trirun("verify", made, "--against", source)[0] == 0
    code, out, _ = trirun("inspect", made, "--json")
    assert code == 0 and vocabulary <= {module["name"] for module in json.loads(out)["modules"]}


def test_the_native_decoder_runs_them(made, expected):
    decoder = NativeDecoder(made, kv_dtype="float32", threads=2)
    assert "2-bit head" in decoder.name
    assert close(decoder.forward(TOKENS)[-1], expected[-1])


def test_transformers_runs_saves_and_decodes_them(made, expected, tmp_path):
    model = load(made, device="cpu", dtype=torch.float32)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, Int2Embedding) and isinstance(head, Int2Linear)
    tied = model.config.tie_word_embeddings
    assert (embedding.weight is head.weight) == tied and (embedding.weight_scale is head.weight_scale) == tied
    with torch.inference_mode():
        assert close(model(torch.tensor([TOKENS])).logits[0], expected)
        model.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved", device="cpu", dtype=torch.float32)
        assert torch.equal(again(torch.tensor([TOKENS])).logits, model(torch.tensor([TOKENS])).logits)
        dense = load(made, device="cpu", dtype=torch.float32).dequantize()
        assert close(dense(torch.tensor([TOKENS])).logits[0], expected)


def test_the_backend_of_transformers_runs_them_with_eight_bit_activations_too(made, expected):
    runner = open_runner(made, device="cpu", engine="transformers", act_bits=8, slots=1)
    found = runner.logits(0, 0, TOKENS, len(TOKENS))
    # Of a head with 16-bit activations: with 8 bits it would differ by more.
    assert (found - expected).norm() < 0.05 * expected.norm()
    runner.close()


def test_the_cuda_decoder_gets_one_weight_where_they_are_tied(made):
    model = load_model(made, device=torch.device("cpu"))
    tied = Checkpoint(made).config["tie_word_embeddings"]
    assert (model.embedding is model.head.weight) == tied
    assert model.head.act_bits == 16 and model.dtype == torch.float16


@pytest.mark.parametrize("to", ["dense", "mlx", "compressed-tensors", "gguf:Q2_0"])
def test_exports_keep_every_value(source, made, to, tmp_path):
    out = tmp_path / ("model.gguf" if to.startswith("gguf") else "E")
    export(made, out, to=to, **({"pre": "gpt-2"} if to.startswith("gguf") else {}))
    if to == "dense":
        again = out
        state = AutoModelForCausalLM.from_pretrained(again, dtype=torch.float16).state_dict()
        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16).state_dict()
        assert all(torch.equal(state[name], value) for name, value in original.items())
        return
    pack(out, tmp_path / "again")
    first, second = Checkpoint(made), Checkpoint(tmp_path / "again")
    for name in first.modules:
        found = second.packed(name) if name in second.modules else None
        dense = dequantize(found) if found is not None else second.tensor(name + ".weight").float()
        assert torch.equal(dense, dequantize(first.packed(name)))
    if to in ("mlx", "gguf:Q2_0"):
        assert set(second.modules) == set(first.modules)


def test_a_tied_matrix_that_is_stored_by_the_name_of_the_head(save_llama, to_ternary, stored_by_head, tmp_path):
    source = stored_by_head(save_llama(ternary_vocabulary(to_ternary)))
    pack(source, tmp_path / "T")
    assert Checkpoint(tmp_path / "T").format.embeddings == [EMBEDDING]
    assert HEAD not in Checkpoint(tmp_path / "T").modules
    found = NativeDecoder(tmp_path / "T", kv_dtype="float32", threads=1).forward(TOKENS[:1])
    model = load(tmp_path / "T", device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        assert close(found[-1], model(torch.tensor([TOKENS[:1]])).logits[0, -1])


def test_an_embedding_that_is_not_ternary_stays_as_it_is(ternary_model, packed):
    opened = Checkpoint(packed)
    assert not opened.format.embeddings and "embeddings" not in opened.config["quantization_config"]
    assert opened.config["quantization_config"]["format_version"] == 1
    assert opened[EMBEDDING + ".weight"].dtype == "F16"


def test_keep_leaves_the_embedding_dense(save_llama, to_ternary, trirun, tmp_path):
    source = save_llama(ternary_vocabulary(to_ternary), tie_word_embeddings=False)
    assert trirun("pack", source, "--out", tmp_path / "T", "--keep", "embed_tokens")[0] == 0
    opened = Checkpoint(tmp_path / "T")
    assert EMBEDDING not in opened.modules and HEAD in opened.modules
    assert NativeDecoder(tmp_path / "T", threads=1).forward([5, 6, 7]).shape[-1] == 8192
