"""Mixtures of experts in GGUF: every expert has its own rows, and the model computes what transformers does."""

import numpy as np
import pytest
import torch
from trirun_kernels import dequantize

from tests.checkpoint.formats.gguf_writer import fp32, two_bits, write_gguf
from tests.checkpoint.formats.test_gguf_model import HIDDEN, metadata, tensors
from trirun_cli import LLM, SamplingParams
from trirun_cli.checkpoint.formats.gguf.file import GgufFile
from trirun_cli.checkpoint.formats.gguf.source import GgufModel
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.errors import InputError
from trirun_cli.workflows.export import export
from trirun_cli.workflows.pack import pack

EXPERTS, WIDTH = 4, 128
FAMILIES = {
    "qwen3moe": ("qwen3_moe", "mlp.gate", {"attn_q_norm": 128, "attn_k_norm": 128}),
    "olmoe": ("olmoe", "mlp.gate", {"attn_q_norm": 256, "attn_k_norm": 128}),
    "llama": ("mixtral", "block_sparse_moe.gate", {}),
}


def mixture(architecture, **changes):
    """Metadata and tensors of a model of one layer with four experts, two of which are used."""
    own = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": WIDTH}
    own = {f"{architecture}.{key}": value for key, value in (own | changes).items()}
    rng = np.random.default_rng(1)
    made = tensors(**{f"blk.0.ffn_{part}.weight": None for part in ("gate", "up", "down")})
    made |= {f"blk.0.{name}.weight": fp32(np.ones(size)) for name, size in FAMILIES[architecture][2].items()}
    made["blk.0.ffn_gate_inp.weight"] = fp32(rng.normal(size=(EXPERTS, HIDDEN)))
    for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
        made[f"blk.0.ffn_{part}_exps.weight"] = two_bits(rng.choice([-0.25, 0, 0.25], (EXPERTS, *shape)), 128)
    return metadata(architecture, **own), made


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_mixture_generates_what_transformers_does(tmp_path, architecture):
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, router, _ = FAMILIES[architecture]
    source = GgufModel(write_gguf(tmp_path / "m.gguf", *mixture(architecture)))
    assert source.config["model_type"] == model_type and f"model.layers.0.{router}.weight" in source
    report = pack(tmp_path / "m.gguf", tmp_path / "out")
    assert report.exact and len(report.modules) == 4 + 3 * EXPERTS
    packed = Checkpoint(tmp_path / "out")
    for module in packed.modules:
        assert torch.equal(dequantize(packed.packed(module)), source.foreign.dense(module))

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.path), dtype=torch.float32).eval()
    state = {name: source.tensor(name).float() for name in source if ".experts." not in name}
    state = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in state.items()}
    prefix = "model.layers.0.mlp.experts."
    matrices = {
        part: torch.stack([source.tensor(f"{prefix}{expert}.{part}.weight").float() for expert in range(EXPERTS)])
        for part in ("gate", "up", "down")
    }
    state[f"{prefix}gate_up_proj"] = torch.cat([matrices["gate"], matrices["up"]], 1)
    state[f"{prefix}down_proj"] = matrices["down"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    ids = [1, 2, 3]
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    llm = LLM(tmp_path / "out", device="cpu", threads=1)
    (made,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=0, ignore_stop_ids=True))
    assert list(made.token_ids) == ids[3:]


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("qwen3moe", {"expert_count": 5}, r"has shape \[4, 256\]; the metadata say \[5, 256\]"),
        ("qwen3moe", {"expert_count": 2**31 - 1}, r"the metadata say \[2147483647, 256\]"),
        ("qwen3moe", {"expert_used_count": 9}, "9 of 4 experts are to be used"),
        ("qwen3moe", {"expert_shared_count": 1}, "shared experts"),
        ("qwen3moe", {"expert_gating_func": 2}, "not chosen by a softmax"),
        ("qwen3moe", {"expert_weights_norm": False}, "not scaled as its family's"),
        ("qwen3moe", {"expert_count": 0}, "is no mixture of experts, which no qwen3moe model is"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "clamps queries"),
    ],
)
def test_mixtures_that_are_not_read(tmp_path, architecture, changes, problem):
    with pytest.raises(InputError, match=problem):
        GgufModel(write_gguf(tmp_path / "m.gguf", *mixture(architecture, **changes)))


def test_an_expert_that_is_not_ternary_is_named(tmp_path):
    meta, made = mixture("qwen3moe")
    rng = np.random.default_rng(3)
    weights = rng.choice([-0.25, 0, 0.25], (EXPERTS, WIDTH, HIDDEN))
    weights[2] = rng.normal(size=(WIDTH, HIDDEN))
    made["blk.0.ffn_up_exps.weight"] = fp32(weights)
    with pytest.raises(Exception, match=r"mlp\.experts\.2\.up"):
        pack(write_gguf(tmp_path / "m.gguf", meta, made), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "to"),
    [(name, "gguf:Q2_0") for name in FAMILIES] + [("qwen3moe", f"gguf:{kind}") for kind in ("TQ1_0", "TQ2_0")],
)
def test_a_mixture_goes_out_as_it_came(tmp_path, architecture, to):
    facts, made = mixture(architecture)
    facts |= {"tokenizer.ggml.tokens": [*"abcdefghijkl", "ab", "<s>", "</s>", "Ġ"], "tokenizer.ggml.merges": ["a b"]}
    pack(write_gguf(tmp_path / "m.gguf", facts, made), tmp_path / "P")
    (tmp_path / "1").mkdir()
    export(tmp_path / "P", tmp_path / "1" / "f.gguf", to="gguf:F16", pre="qwen2")
    floats, report = (
        GgufModel(tmp_path / "1" / "f.gguf"),
        export(tmp_path / "P", tmp_path / "1" / "x.gguf", to=to, pre="qwen2"),
    )
    assert len(report.modules) == 4 + 3 * EXPERTS
    written, came = GgufFile(tmp_path / "1" / "x.gguf"), GgufFile(tmp_path / "m.gguf")
    assert written.tensors["blk.0.ffn_up_exps.weight"].shape == (EXPERTS, WIDTH, HIDDEN)
    assert written.metadata.count(".expert_used_count") == 2
    # llama.cpp's olmoe takes no embedding for a head.
    own = {"output.weight"} if architecture == "olmoe" else set()
    assert set(written.tensors) == set(came.tensors) | own
    assert pack(tmp_path / "1" / "x.gguf", tmp_path / "P2").exact
    first, again = Checkpoint(tmp_path / "P"), Checkpoint(tmp_path / "P2")
    assert first.modules == again.modules and first.config["model_type"] == again.config["model_type"]
    for module in first.modules:
        assert torch.equal(dequantize(first.packed(module)), dequantize(again.packed(module)))
        assert torch.equal(dequantize(first.packed(module)).half(), floats.tensor(f"{module}.weight"))
    # In floats, an expert is found by no name of transformers'.
    assert pack(tmp_path / "1" / "f.gguf", tmp_path / "P3").exact
    third = Checkpoint(tmp_path / "P3")
    assert third.modules == first.modules
    for module in first.modules:
        assert torch.equal(dequantize(first.packed(module)), dequantize(third.packed(module)))
    export(tmp_path / "P2", tmp_path / "2.gguf", to=to, pre="qwen2")
    second = GgufFile(tmp_path / "2.gguf")
    for name in written.tensors:
        assert bytes(written.raw(name)) == bytes(second.raw(name)), name
