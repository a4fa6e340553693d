"""Models of GGUF files: their tokens and log-probabilities beside llama.cpp's, names, orders of rows, refusals."""

import json

import numpy as np
import pytest
import torch
from trirun_kernels import dequantize

from tests.checkpoint.formats.gguf_writer import DATA, F32, PQ2_0, Q2_0, fp16, fp32, two_bits, write_gguf, write_parts
from trirun_cli import LLM, SamplingParams
from trirun_cli.checkpoint.formats import gguf_file, open_source
from trirun_cli.checkpoint.formats.gguf.blocks import read_values
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.errors import InputError
from trirun_cli.workflows.pack import pack

EXPECTED = json.loads((DATA / "gguf_expected.json").read_text())
MODELS = list(EXPECTED["models"])
HIDDEN, VOCABULARY = 256, 16


def dense_model(source):
    """transformers' model in float32 with a GGUF file's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.path), dtype=torch.float32)
    missing, unexpected = model.load_state_dict({name: source.tensor(name).float() for name in source}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_log_probabilities_beside_llama_cpp(name):
    """llama.cpp's products take int8 activations, so that its log-probabilities differ by what the file says."""
    expected, source = EXPECTED["models"][name], GgufModel(DATA / f"{name}.gguf")
    model, ids, rows = dense_model(source), list(expected["prompt"]), []
    for token in expected["greedy"]:
        with torch.no_grad():
            rows.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).numpy())
        assert int(rows[-1].argmax()) == token
        ids.append(token)
    theirs = np.load(DATA / f"{name}.logprobs.npy")
    assert np.abs(np.stack(rows) - theirs).max() <= 1.001 * expected["logprob_difference"]


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_file_generates_llama_cpp_s_tokens(tmp_path, name):
    expected, source = EXPECTED["models"][name], GgufModel(DATA / f"{name}.gguf")
    report = pack(DATA / f"{name}.gguf", tmp_path / "out")
    # The 14 linear layers, and the embedding and the head where the file has them in 2 bits.
    quantized = sum(tensor.type.quantized for tensor in source.file.tensors.values())
    assert report.exact and len(report.modules) == max(quantized, 14) and report.activation_bits == 16
    assert report.bytes_before == (DATA / f"{name}.gguf").stat().st_size
    packed = Checkpoint(tmp_path / "out")
    for module in packed.modules:
        assert torch.equal(dequantize(packed.packed(module)), source.foreign.dense(module))
    llm = LLM(tmp_path / "out", device="cpu", threads=1)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_stop_ids=True)
    (made,) = llm.generate([expected["prompt"]], params)
    assert list(made.token_ids) == expected["greedy"]


def test_one_weight_in_every_two_bit_type_is_one_weight(tmp_path):
    """Q2_0 of 64, PQ2_0 and the first Q2_0 of 128 of the same ternary weights."""
    source = GgufModel(DATA / "tiny-llama-Q2_0.gguf")
    for group_size, kind in ((128, PQ2_0), (128, Q2_0), (64, Q2_0)):
        tensors = {}
        for name, tensor in source.file.tensors.items():
            raw = source.file.raw(name).tobytes()
            if tensor.type.quantized:
                values = np.concatenate([piece for _, piece in read_values(source.file, name)])
                tensors[name] = two_bits(values, group_size, kind)
            else:
                tensors[name] = (F32, tensor.shape, raw)
        path = write_gguf(tmp_path / "m.gguf", dict(source.file.metadata), tensors)
        other = GgufModel(path)
        for name in source:
            assert torch.equal(other.tensor(name), source.tensor(name))
        assert other.foreign.read("model.layers.0.self_attn.q_proj")[0].spec.group_size == 128


def metadata(architecture="llama", **changes):
    """Of a model of one layer, two heads over one, and tokens of one letter."""
    own = {
        "block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": 128, "context_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tokens = [*"abcdefghijklm", "<s>", "</s>", "Ġ"]
    made = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}
    made |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * 13 + [3, 3, 1]), "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 13, "tokenizer.ggml.eos_token_id": 14,
    }  # fmt: skip
    return {key: value for key, value in (made | changes).items() if value is not None}


def tensors(norms=("attn_norm", "ffn_norm"), **changes):
    """Its tensors: ternary weights in PQ2_0, norms, an embedding that is the head as well."""
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (128, HIDDEN), "attn_v": (128, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (128, HIDDEN), "ffn_up": (128, HIDDEN), "ffn_down": (HIDDEN, 128),
    }  # fmt: skip
    sizes = {"ffn_sub_norm": 128, "attn_q_norm": 128, "attn_k_norm": 128}
    made = {
        "token_embd.weight": fp16(rng.normal(size=(VOCABULARY, HIDDEN))),
        "output_norm.weight": fp32(np.ones(HIDDEN)),
    }
    made |= {f"blk.0.{name}.weight": fp32(np.ones(sizes.get(name, HIDDEN))) for name in norms}
    for name, shape in shapes.items():
        made[f"blk.0.{name}.weight"] = two_bits(rng.choice([-0.5, 0, 0.5], shape), 128)
    return {name: tensor for name, tensor in (made | changes).items() if tensor is not None}


def written(path, meta=None, **changes):
    return write_gguf(path / "m.gguf", metadata() if meta is None else meta, tensors(**changes))


@pytest.mark.parametrize(
    ("architecture", "norms", "model_type", "bits"),
    [
        ("llama", ("attn_norm", "ffn_norm"), "llama", 16),
        ("mistral", ("attn_norm", "ffn_norm"), "mistral", 16),
        ("qwen3", ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"), "qwen3", 16),
        ("bitnet-b1.58", ("attn_norm", "ffn_norm", "attn_sub_norm", "ffn_sub_norm"), "bitnet", 8),
        ("bitnet-25", ("attn_norm", "ffn_norm", "attn_sub_norm", "ffn_sub_norm"), "bitnet", 8),
    ],
)
def test_every_architecture_loads_in_transformers(tmp_path, architecture, norms, model_type, bits):
    source = GgufModel(write_gguf(tmp_path / "m.gguf", metadata(architecture), tensors(norms)))
    assert source.config["model_type"] == model_type and source.activation_bits == bits
    assert source.config["rms_norm_eps"] == 1e-5 and source.config["tie_word_embeddings"]
    assert dense_model(source)(torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCABULARY)


def test_biases_of_qwen2_and_llama(tmp_path):
    qkv = {
        f"blk.0.attn_{name}.bias": fp32(np.arange(float(size))) for name, size in (("q", 256), ("k", 128), ("v", 128))
    }
    qwen2 = GgufModel(written(tmp_path, metadata("qwen2"), **qkv))
    assert qwen2.tensor("model.layers.0.self_attn.q_proj.bias").tolist() == list(range(256))
    dense_model(qwen2)
    both = qkv | {"blk.0.attn_output.bias": fp32(np.ones(256))}
    llama = GgufModel(written(tmp_path, **both))
    # Heads of 128: the rows 0, 2, 4, … are the first half.
    assert llama.tensor("model.layers.0.self_attn.q_proj.bias")[:3].tolist() == [0, 2, 4]
    assert llama.tensor("model.layers.0.self_attn.k_proj.bias")[64:66].tolist() == [1, 3]
    dense_model(llama)
    with pytest.raises(InputError, match=r"blk\.0\.attn_q\.bias is no tensor of a llama model"):
        GgufModel(written(tmp_path, **qkv))


def test_rows_of_q_and_k_are_put_in_order_with_their_scales(tmp_path):
    """llama.cpp's order is ``reshape(heads, 2, half).swapaxes(1, 2)`` of transformers'."""
    rng = np.random.default_rng(1)
    weight = rng.choice([-1, 0, 1], (HIDDEN, HIDDEN)) * np.repeat(rng.choice([0.5, 1, 2], (HIDDEN, 2)), 128, axis=1)
    # A group of zeros has no scale to compare.
    assert (weight.reshape(-1, 128) != 0).any(1).all()
    permuted = weight.reshape(2, 2, 64, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    source = GgufModel(written(tmp_path, **{"blk.0.attn_q.weight": two_bits(permuted, 128)}))
    for found in (
        source.foreign.read("model.layers.0.self_attn.q_proj")[0].dequantize(),
        source.foreign.dense("model.layers.0.self_attn.q_proj"),
        source.tensor("model.layers.0.self_attn.q_proj.weight"),
    ):
        assert np.array_equal(found.numpy(), weight)


def test_layers_of_float_types_are_packed_where_they_are_ternary(tmp_path):
    rng = np.random.default_rng(2)
    ternary, other = rng.choice([-0.5, 0, 0.5], (128, HIDDEN)), rng.normal(size=(128, HIDDEN))
    path = written(tmp_path, **{"blk.0.ffn_gate.weight": fp16(ternary), "blk.0.ffn_up.weight": fp16(other)})
    report = pack(path, tmp_path / "out")
    names = {layer.name for layer in report.modules}
    assert "model.layers.0.mlp.gate_proj" in names and "model.layers.0.mlp.up_proj" not in names
    made = Checkpoint(tmp_path / "out")
    assert made.format.modules_to_not_convert == ["lm_head", "model.layers.0.mlp.up_proj"]
    assert np.array_equal(made.tensor("model.layers.0.mlp.up_proj.weight").numpy(), other.astype(np.float16))


def test_what_stays_float_is_reported_with_its_bytes_and_the_reason(tmp_path, trirun):
    other = fp16(np.random.default_rng(2).normal(size=(128, HIDDEN)))
    path = written(tmp_path, **{"blk.0.ffn_up.weight": other})
    code, out, errors = trirun("pack", path, "--out", tmp_path / "out", "--json")
    assert code == 0, errors
    facts = {"dtype": "F16", "why": "F16 in the source"}
    assert json.loads(out)["kept"] == [
        {"name": "model.embed_tokens", "shape": [16, HIDDEN], "bytes": 16 * HIDDEN * 2} | facts,
        {"name": "model.layers.0.mlp.up_proj", "shape": [128, HIDDEN], "bytes": 128 * HIDDEN * 2} | facts,
    ]
    code, out, _ = trirun("pack", path, "--out", tmp_path / "out", "--overwrite")
    assert code == 0 and "kept as floats: 72.0 KiB" in out and "F16 in the source" in out


def test_rotary_scaling(tmp_path):
    plain = GgufModel(written(tmp_path, metadata(**{"llama.rope.freq_base": 500000.0})))
    assert plain.config["rope_theta"] == 500000 and "rope_scaling" not in plain.config
    settings = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16}  # fmt: skip
    yarn = GgufModel(written(tmp_path, metadata(**settings)))
    assert yarn.config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16
    }  # fmt: skip
    with pytest.raises(InputError, match="'longrope'"):
        GgufModel(written(tmp_path, metadata(**{"llama.rope.scaling.type": "longrope"})))


def test_the_factors_of_llama_3_are_recognized(tmp_path):
    """llama.cpp's converter, by the formula of transformers' ``_compute_llama3_parameters``."""
    low, high = 8192 / 1, 8192 / 4
    factors = []
    for frequency in 500000.0 ** -(np.arange(0, 128, 2) / 128):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / 32 + smooth)
        factors.append(1.0 if wavelength < high else 32.0 if wavelength > low else between)
    meta = metadata(**{"llama.rope.freq_base": 500000.0})
    source = GgufModel(written(tmp_path, meta, **{"rope_freqs.weight": fp32(np.array(factors))}))
    assert source.config["rope_scaling"]["rope_type"] == "llama3" and source.config["rope_scaling"]["factor"] == 32
    with pytest.raises(InputError, match="not the factors of Llama 3"):
        GgufModel(written(tmp_path, meta, **{"rope_freqs.weight": fp32(np.array(factors) * 1.1)}))


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"general.architecture": "qwen35"}, "its architecture is 'qwen35'; llama, mistral, qwen2, qwen3"),
        ({"general.architecture": "maple"}, "'maple'"),
        ({"general.architecture": 7}, "general.architecture is 7, not a string"),
        ({"prism.hadamard.version": 2}, "rotated by a Hadamard transform"),
        ({"split.count": 3}, "one of 3 parts of a model; its first is named NAME-00001-of-00003.gguf"),
        ({"llama.expert_count": 8}, "have no llama.expert_used_count"),
        ({"llama.block_count": 2**31 - 1}, "block_count is 2147483647, in a file of 11 tensors"),
        ({"llama.block_count": 2}, r"no tensor blk\.1\.attn_norm\.weight"),
        ({"llama.embedding_length": 128}, r"has shape \[16, 256\]; the metadata say \[16, 128\]"),
        ({"llama.attention.head_count": 3}, "3 heads of 85"),
        ({"llama.attention.head_count": np.array([2, 2])}, "is a list of 2, not an integer"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "the metadata have no llama.attention.layer_norm"),
        ({"llama.rope.dimension_count": 64}, "rope.dimension_count is 64, the heads' size 128"),
        ({"tokenizer.ggml.pre": "default"}, "pre is 'default'; read are llama3"),
        ({"tokenizer.ggml.pre": None}, "pre is 'none is named'"),
        ({"tokenizer.ggml.model": "t5"}, "of the kind 't5'"),
        ({"tokenizer.ggml.tokens": ["a"] * 16}, "the token 'a' twice"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(17)], "tokenizer.ggml.token_type": None}, "17 tokens, and"),
        ({"tokenizer.ggml.eos_token_id": 16}, "eos_token_id is 16, not one of 16 tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "does not go together"),
        ({"tokenizer.ggml.token_type": np.array([1])}, "is a list of 1, not a list of 16 numbers"),
    ],
)
def test_models_that_are_not_read(tmp_path, meta, problem):
    with pytest.raises(InputError, match=problem):
        GgufModel(written(tmp_path, metadata(**meta)))


def test_a_tensor_that_nobody_asked_for(tmp_path):
    with pytest.raises(InputError, match=r"blk\.0\.ffn_gate_inp\.weight is no tensor of a llama model"):
        GgufModel(written(tmp_path, **{"blk.0.ffn_gate_inp.weight": fp32(np.ones(4))}))


def test_a_directory_that_holds_one_file(tmp_path, trirun):
    path = written(tmp_path)
    assert gguf_file(tmp_path) == path and open_source(tmp_path).config["model_type"] == "llama"
    code, _, errors = trirun("pack", tmp_path, "--out", tmp_path / "out")
    assert code == 0, errors
    assert trirun("verify", tmp_path / "out", "--against", path)[0] == 0
    code, _, errors = trirun("pack", path, "--out", tmp_path, "--overwrite")
    assert code == 3 and "is or holds the model itself" in errors and path.exists()
    code, _, errors = trirun("quantize", path)
    assert code == 3 and "is a file; a model is a directory" in errors and "trirun pack reads GGUF files" in errors
    path.with_name("n.gguf").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="2 GGUF files"):
        open_source(tmp_path)


def test_a_model_in_parts_is_one_model(tmp_path, trirun):
    whole = GgufModel(written(tmp_path))
    (tmp_path / "parts").mkdir()
    first, second, third = write_parts(tmp_path / "parts", metadata(), tensors(), 3)
    assert gguf_file(tmp_path / "parts") == first
    source = GgufModel(first)
    assert source.files == [first, second, third] and source.names == whole.names
    for name in source:
        assert torch.equal(source.tensor(name), whole.tensor(name))
    report = pack(tmp_path / "parts", tmp_path / "out")
    assert report.bytes_before == sum(path.stat().st_size for path in (first, second, third))
    with pytest.raises(InputError, match="one of 3 parts of a model; its first is named") as refused:
        GgufModel(second)
    assert refused.value.fix == "name the first"
    third.write_bytes(second.read_bytes())
    with pytest.raises(InputError, match=r"00003-of-00003\.gguf is not part 3 of a model"):
        GgufModel(first)
    third.unlink()
    with pytest.raises(InputError, match=r"00003-of-00003\.gguf: No such file"):
        GgufModel(first)


def test_commands_run_a_file_packed_once_into_the_cache(tmp_path, trirun, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes((DATA / "tiny-qwen3-TQ2_0.gguf").read_bytes())
    asked = ("--prompt", "one two", "--max-tokens", 4, "--temperature", 0, "--device", "cpu")
    code, first, errors = trirun("generate", "-c", path, *asked)
    assert code == 0 and "once" in errors, errors
    code, second, errors = trirun("generate", "-c", path, *asked)
    assert (code, second) == (0, first) and "packing" not in errors
    assert len(list((tmp_path / "cache" / "trirun").iterdir())) == 1
    path.touch()
    assert trirun("inspect", path)[0] == 0
    assert len(list((tmp_path / "cache" / "trirun").iterdir())) == 2
    assert trirun("generate", "-c", tmp_path / "none.gguf", *asked)[0] == 3
