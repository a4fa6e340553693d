"""``trirun export``: every weight keeps its value, or nothing is written."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trirun_gptq.run.progress import ModuleStarted
from trirun_kernels import dequantize

from tests.small_models import save_ternary
from trirun_cli.checkpoint.formats.words import unpack_words
from trirun_cli.checkpoint.model_dir import ModelDir, read_config
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.errors import InputError, UsageError
from trirun_cli.workflows.export import TARGETS, ExportedLayer, export
from trirun_cli.workflows.pack import pack

TOKENS = torch.arange(3, 40).view(1, -1)
BLOCKS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 34: (256, 54), 35: (256, 66), 42: (64, 18)}


def read_gguf(path):
    """Metadata, and each tensor's (dimensions, type, bytes), by the format's description alone."""
    data, at = path.read_bytes(), 24
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)

    def number(form):
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text():
        nonlocal at
        length = number("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return number({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    metadata = {}
    for _ in range(pairs):
        key = text()
        metadata[key] = value(number("I"))
    places = []
    for _ in range(tensors):
        name = text()
        dimensions = [number("Q") for _ in range(number("I"))]
        places.append((name, dimensions, number("I"), number("Q")))
    start, expected, found = -(-at // 32) * 32, 0, {}
    for name, dimensions, kind, offset in places:
        assert offset == expected and dimensions[0] % BLOCKS[kind][0] == 0
        size = torch.Size(dimensions).numel() // BLOCKS[kind][0] * BLOCKS[kind][1]
        found[name] = (dimensions, kind, data[start + offset : start + offset + size])
        expected += -(-size // 32) * 32
    assert len(data) == start + expected
    return metadata, found


def test_every_target_from_the_command_line(trirun, packed, tmp_path):
    for to in TARGETS:
        pre = ("--pre", "gpt-2") if to.startswith("gguf") else ()
        out = tmp_path / to.replace(":", "-")
        code, text, _ = trirun("export", packed, "--to", to, "--out", out, "--json", *pre)
        document = json.loads(text)
        assert code == 0 and document["schema"] == "trirun.export/1" and len(document["modules"]) == 14
        code, _, err = trirun("export", packed, "--to", to, "--out", out, *pre)
        assert code == 3 and "exists" in err
        assert trirun("export", packed, "--to", to, "--out", out, "--overwrite", "-q", *pre) == (0, "", "")
        assert not out.with_name(out.name + ".partial").exists()


def test_a_gguf_file_holds_the_weights_by_llama_cpp_names_and_order(packed, ternary_model, tmp_path):
    export(packed, tmp_path / "f.gguf", to="gguf:F16", pre="gpt-2")
    export(packed, tmp_path / "q.gguf", to="gguf:Q2_0", pre="gpt-2")
    source = ModelDir(ternary_model)
    metadata, dense = read_gguf(tmp_path / "f.gguf")
    assert metadata["general.architecture"] == "llama" and metadata["llama.attention.head_count_kv"] == 2
    assert metadata["llama.rope.freq_base"] == 10000 and metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert len(metadata["tokenizer.ggml.tokens"]) == 8192 and metadata["tokenizer.ggml.token_type"][0] == 3
    assert "output.weight" not in dense  # tied
    heads, theirs = {"q_proj": 4, "k_proj": 2}, {"o_proj": "attn_output"}
    for name in source.names:
        tensor = source.tensor(name)
        if name.startswith("model.layers") and name.endswith("proj.weight"):
            _, _, layer, block, module, _ = name.split(".")
            part = theirs.get(module) or f"{'attn' if block == 'self_attn' else 'ffn'}_{module.removesuffix('_proj')}"
            dimensions, kind, data = dense[f"blk.{layer}.{part}.weight"]
            # Halves of a head become neighbours.
            turned = tensor
            if module in heads:
                turned = tensor.unflatten(0, (heads[module], 2, -1)).transpose(1, 2).flatten(0, 2)
            assert dimensions == list(tensor.shape[::-1]) and kind == 1
            assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float16).view(tensor.shape), turned)
    metadata, blocks = read_gguf(tmp_path / "q.gguf")
    assert metadata["general.file_type"] == 41
    assert {kind for name, (_, kind, _) in blocks.items() if "ffn" in name and "norm" not in name} == {42}
    assert blocks["blk.0.attn_norm.weight"][1] == 0 and blocks["token_embd.weight"][1] == 1


def test_rows_that_are_no_whole_blocks_are_stored_as_fp16_and_said(packed, tmp_path):
    report = export(packed, tmp_path / "t.gguf", to="gguf:TQ2_0", pre="gpt-2")
    assert {layer.stored for layer in report.modules} == {"F16"}  # 128 and 192 columns


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(trirun, packed, tmp_path):
    code, _, err = trirun("export", packed, "--to", "gguf:Q2_0", "--out", tmp_path / "q.gguf")
    assert code == 3 and "which has no name in llama.cpp" in " ".join(err.split()) and "--pre NAME" in err
    assert not list(tmp_path.iterdir())


def test_transformers_computes_the_same_from_the_dense_export(packed, ternary_model, tmp_path):
    export(packed, tmp_path / "D", to="dense")
    with torch.inference_mode():
        want, got = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits
            for path in (ternary_model, tmp_path / "D")
        )
    assert torch.equal(want, got)
    source, exported = (load_file(path / "model.safetensors") for path in (ternary_model, tmp_path / "D"))
    assert all(torch.equal(source[name], exported[name]) for name in source)  # -0.0 equals 0.0


@pytest.mark.parametrize("to", ["mlx", "compressed-tensors", "bitnet"])
def test_what_is_exported_packs_to_the_same_checkpoint(trirun, packed, tmp_path, to):
    export(packed, tmp_path / "E", to=to)
    report = pack(tmp_path / "E", tmp_path / "T")
    assert report.exact and trirun("verify", tmp_path / "T", "--against", tmp_path / "E")[0] == 0
    was, again = Checkpoint(packed), Checkpoint(tmp_path / "T")
    assert was.names == again.names and "quantization" not in again.config
    for name in was.modules:
        assert torch.equal(was.packed(name).words, again.packed(name).words)
    export(tmp_path / "T", tmp_path / "E2", to=to)
    assert (tmp_path / "E" / "model.safetensors").read_bytes() == (tmp_path / "E2" / "model.safetensors").read_bytes()


def test_transformers_runs_the_bitnet_export_as_the_model_with_8_bit_activations(tmp_path, monkeypatch):
    # What transformers would have compiled runs as torch's own operators: the compiler takes a minute and is not ours.
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    model, source, _ = save_ternary("llama", {}, tmp_path)
    pack(source, tmp_path / "T8", activation_bits=8)
    assert not export(tmp_path / "T8", tmp_path / "B", to="bitnet").notes

    def rounded(module, inputs):
        scale = 127 / inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return ((inputs[0] * scale).round().clamp(-128, 127) / scale,)

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        want = model(TOKENS).logits
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "B", dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_packed_embedding_of_its_own_stays_packed(packed, tmp_path):
    """As MLX packs them, and Ternary-Bonsai has them."""
    from safetensors.torch import save_file
    from trirun_gptq.lossless.ternary import ternarize

    from trirun_cli.checkpoint.formats import mlx

    export(packed, tmp_path / "M", to="mlx")
    tensors = load_file(tmp_path / "M" / "model.safetensors")
    values = torch.randint(-1, 2, (8192, 128)) * torch.tensor(0.03125)
    written, _ = mlx.write(ternarize(values))
    tensors.pop("model.embed_tokens.weight")
    tensors |= {f"model.embed_tokens{suffix}": tensor.contiguous() for suffix, tensor in written.items()}
    save_file(tensors, tmp_path / "M" / "model.safetensors")
    config = json.loads((tmp_path / "M" / "config.json").read_text())
    config["quantization"]["model.embed_tokens"] = {"group_size": 128, "bits": 2}
    (tmp_path / "M" / "config.json").write_text(json.dumps(config))
    assert pack(tmp_path / "M", tmp_path / "T").exact
    assert torch.equal(dequantize(Checkpoint(tmp_path / "T").packed("model.embed_tokens")), values)


def test_what_a_format_does_not_hold_leaves_nothing(trirun, save_llama, tmp_path):
    def change(model):
        with torch.no_grad():
            for layer in model.model.layers:
                for module in layer.modules():
                    if isinstance(module, torch.nn.Linear):
                        rows = torch.rand(module.weight.shape[0], 1).half() + 0.5
                        module.weight.copy_(torch.randint(-1, 2, module.weight.shape).half() * rows)

    pack(save_llama(change), tmp_path / "T")
    code, _, err = trirun("export", tmp_path / "T", "--to", "bitnet", "--out", tmp_path / "B")
    assert code == 3 and "BitNet's format has one" in " ".join(err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["T"]


def test_the_events_and_the_usage_errors(packed, plain_model, tmp_path):
    events = []
    export(packed, tmp_path / "q.gguf", to="gguf:Q2_0", pre="gpt-2", progress=events.append)
    assert [type(event) for event in events] == [ModuleStarted, ExportedLayer] * 14
    assert [event.index for event in events[::2]] == list(range(14))
    with pytest.raises(UsageError, match="--to gguf:Q4_0: one of gguf:Q2_0"):
        export(packed, tmp_path / "x", to="gguf:Q4_0")
    with pytest.raises(UsageError, match="of gguf targets alone"):
        export(packed, tmp_path / "x", to="mlx", pre="gpt-2")
    with pytest.raises(InputError, match="is not quantized"):
        export(plain_model, tmp_path / "x", to="mlx")


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_mixtures_of_experts_go_out_and_come_back(tmp_path, family):
    experts = {"num_local_experts" if family == "mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
    model, _, _ = save_ternary(
        family, {"vocab_size": 512, "head_dim": 16, "moe_intermediate_size": 64} | experts, tmp_path
    )
    was = Checkpoint(tmp_path / "packed")
    assert any(".mlp.experts.3.gate" in module for module in was.modules)
    export(tmp_path / "packed", tmp_path / "C", to="compressed-tensors")
    stored = "block_sparse_moe.experts.3.w1" if family == "mixtral" else "mlp.experts.3.gate_proj"
    assert f"model.layers.0.{stored}.weight_packed" in ModelDir(tmp_path / "C")
    assert pack(tmp_path / "C", tmp_path / "T").exact
    again = Checkpoint(tmp_path / "T")
    assert again.modules == was.modules
    for module in was.modules:
        assert torch.equal(was.packed(module).words, again.packed(module).words)
    export(tmp_path / "packed", tmp_path / "D", to="dense")
    with torch.inference_mode():
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "D", dtype=torch.float32)(TOKENS).logits
        assert torch.equal(got, model(TOKENS).logits)
    with pytest.raises(InputError, match="a mixture of experts, which trirun does not write as bitnet"):
        export(tmp_path / "packed", tmp_path / "B", to="bitnet")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_mlx_holds_all_experts_of_a_layer_in_one_tensor(tmp_path, family):
    experts = {"num_local_experts" if family == "mixtral" else "num_experts": 11, "num_experts_per_tok": 2}
    sizes = {"vocab_size": 512, "head_dim": 16, "moe_intermediate_size": 64, "intermediate_size": 64}
    save_ternary(family, sizes | experts, tmp_path)
    was = Checkpoint(tmp_path / "packed")
    export(tmp_path / "packed", tmp_path / "M", to="mlx")
    stored, block = ModelDir(tmp_path / "M"), "block_sparse_moe" if family == "mixtral" else "mlp"
    # What transformers nests, or calls otherwise, and mlx_lm does not look for there.
    config = read_config(tmp_path / "M")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["num_local_experts" if family == "mixtral" else "num_experts"] == 11
    stack = f"model.layers.0.{block}.switch_mlp.down_proj"
    assert stored[f"{stack}.weight"].shape == (11, 64, 4) and not any(".experts." in name for name in stored)
    for number, expert in enumerate(stored.tensor(f"{stack}.weight").view(torch.int32)):
        packed = was.codes(f"model.layers.0.mlp.experts.{number}.down")
        assert np.array_equal(unpack_words(expert).numpy(), packed.codes[:, : packed.k])
    assert pack(tmp_path / "M", tmp_path / "T").exact
    again = Checkpoint(tmp_path / "T")
    assert again.modules == was.modules
    for module in was.modules:
        assert torch.equal(was.packed(module).words, again.packed(module).words)
        assert torch.equal(was.packed(module).scales, again.packed(module).scales)
    export(tmp_path / "T", tmp_path / "M2", to="mlx")
    for name in stored:
        assert torch.equal(stored.tensor(name), ModelDir(tmp_path / "M2").tensor(name)), name


def test_a_mixture_that_llama_cpp_computes_otherwise_is_refused(tmp_path):
    sizes = {"vocab_size": 512, "head_dim": 16, "moe_intermediate_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
    save_ternary("qwen3_moe", sizes | experts, tmp_path)
    with pytest.raises(InputError, match="qwen3moe scales the chosen experts' weights to a sum of 1"):
        export(tmp_path / "packed", tmp_path / "q.gguf", to="gguf:Q2_0", pre="gpt-2")
    assert not (tmp_path / "q.gguf").exists()
