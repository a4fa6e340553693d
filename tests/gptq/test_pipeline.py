"""The walk over a whole model: what is written, families, and resuming."""

import errno
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from trirun_gptq.errors import QuantizationError
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.recipe import Override
from trirun_gptq.run.progress import BlockStarted

from tests.gptq.models import RECIPE, SIZES, Tensors, calibration, load_result, make_model, run


def true_error(original, quantized, sequences, index):
    """Relative squared error of the hidden states after a block, both models run whole on the held-out sequences."""
    held_out = torch.stack(sequences[RECIPE.samples :])
    with torch.no_grad():
        states = [
            m.model(held_out, output_hidden_states=True, use_cache=False).hidden_states for m in (original, quantized)
        ]
    before, after = (state[index + 1] for state in states)
    return float((after - before).square().sum() / before.square().sum())


def test_everything_of_the_source_is_written_once(tmp_path):
    source = transformers.LlamaForCausalLM.from_pretrained(make_model(tmp_path), dtype=torch.float16).state_dict()
    written, report, log = run(tmp_path)
    names = {module.name for module in report.modules}
    assert len(names) == 2 * 7
    assert written.keys() == source.keys() | {f"{name}.weight_scale" for name in names}
    for name, tensor in source.items():
        if name.removesuffix(".weight") not in names:
            assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype
    assert [block.name for block in report.blocks] == ["model.layers.0", "model.layers.1"]
    assert report.blocks == log.blocks and report.modules == log.modules
    assert {"embed", "hessian", "solve", "replay"} <= log.stages
    assert report.tokens == 6 * 24
    assert all(0 < module.loss < 0.6 for module in report.modules)
    assert report.bits_per_weight == 2 + 16 / 32


def test_reported_block_error_is_that_of_the_written_model(tmp_path):
    """The activations carried from block to block are the ones the finished model really has."""
    sequences = calibration()
    written, report, _ = run(make_model(tmp_path, num_hidden_layers=3), sequences=sequences)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    quantized = load_result(tmp_path, written, report)
    for index in (0, 1):
        # Products may run in bfloat16 during quantization.
        assert true_error(original, quantized, sequences, index) == pytest.approx(report.blocks[index].error, rel=0.03)


@pytest.mark.parametrize(
    ("family", "extra", "layers"),
    [
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True}, 7),
        ("Mistral", {"sliding_window": 8}, 7),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 7),
        ("Qwen3", {"head_dim": 16}, 7),
        ("Gemma2", {"head_dim": 16, "sliding_window": 8}, 7),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, 7),
        ("Phi3", {}, 4),
        ("Phi", {}, 6),
        ("Olmo2", {}, 7),
        ("StableLm", {}, 7),
    ],
)
def test_families(tmp_path, family, extra, layers):
    if family == "Gemma3Text":
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(**{**SIZES, **extra})
        transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    else:
        make_model(tmp_path, family, torch.float32, **extra)
    sequences = calibration()
    written, report, _ = run(tmp_path, sequences=sequences)
    assert len(report.modules) == 2 * layers
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    quantized = load_result(tmp_path, written, report)
    assert true_error(original, quantized, sequences, 0) == pytest.approx(report.blocks[0].error, rel=0.05)


def test_tied_embeddings_may_be_stored_by_the_name_of_the_head(tmp_path):
    make_model(tmp_path, tie_word_embeddings=True)
    usual, report, _ = run(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    written, other, _ = run(tmp_path)
    usual["lm_head.weight"] = usual.pop("model.embed_tokens.weight")
    assert written.keys() == usual.keys() and all(torch.equal(written[name], usual[name]) for name in usual)
    assert other.predictions == report.predictions


def test_overrides_and_ignore(tmp_path):
    make_model(tmp_path)
    recipe = replace(
        RECIPE,
        ignore=("o_proj",),
        overrides={"down_proj": Override(grid="zero"), r"k_proj": Override(group_size=-1)},
    )
    written, report, _ = run(tmp_path, recipe)
    assert report.kept == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float16
    assert "model.layers.0.mlp.down_proj.weight_zero" in written
    specs = {module.name: module.spec for module in report.modules}
    assert specs["model.layers.1.self_attn.k_proj"].group_size == -1
    assert specs["model.layers.1.mlp.down_proj"].zero is None
    assert specs["model.layers.1.self_attn.q_proj"].group_size == 32


@pytest.mark.slow
@pytest.mark.parametrize("methods", [("ste",), ("gumbel", "ste")])
def test_refinement_lowers_the_held_out_error_or_is_rolled_back(tmp_path, methods):
    make_model(tmp_path)
    recipe = replace(RECIPE, refine_steps=24, refine_lr=2e-3, refine_scale_lr=2e-3, engines=methods)
    _, report, log = run(tmp_path, recipe)
    assert all(block.error <= block.error_before_refine for block in report.blocks)
    assert "refine" in log.stages
    if "ste" in methods:
        assert report.blocks[0].error < report.blocks[0].error_before_refine
    assert all((block.method in methods) == (block.error < block.error_before_refine) for block in report.blocks)
    written, report, _ = run(tmp_path, replace(recipe, refine_lr=10.0))
    assert [block.error for block in report.blocks] == [block.error_before_refine for block in report.blocks]
    plain, _, _ = run(tmp_path)
    assert all(torch.equal(written[name], plain[name]) for name in plain)


def test_sequences_of_different_lengths(tmp_path):
    make_model(tmp_path)
    sequences = [sequence[: 24 - 2 * (i % 3)] for i, sequence in enumerate(calibration())]
    _, report, _ = run(tmp_path, sequences=sequences)
    assert report.tokens == sum(len(sequence) for sequence in sequences[:6])


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    model, state = make_model(tmp_path / "model", num_hidden_layers=3), tmp_path / "state"
    whole, report, _ = run(model)

    def kill(event):
        if isinstance(event, BlockStarted) and event.index == 2:
            raise Killed

    with pytest.raises(Killed):
        quantize_model(model, RECIPE, calibration(), Tensors(), kill, state_dir=state)
    resumed, second, log = run(model, state_dir=state)
    assert [block.resumed for block in log.blocks] == [True, True, False]
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert [module.loss for module in second.modules] == [module.loss for module in report.modules]
    assert not list(state.glob("*.partial"))


def test_the_state_of_another_run_is_refused(tmp_path):
    model, state = make_model(tmp_path / "model"), tmp_path / "state"
    run(model, state_dir=state)
    with pytest.raises(QuantizationError, match=r"state of another run \(different recipe\)"):
        run(model, replace(RECIPE, damp=0.1), state_dir=state)
    with pytest.raises(QuantizationError, match=r"different calibration"):
        run(model, sequences=calibration(seed=1), state_dir=state)
    block = state / "block-0000.safetensors"
    block.write_bytes(block.read_bytes()[:-10])
    with pytest.raises(QuantizationError, match=r"block-0000.safetensors is damaged"):
        run(model, state_dir=state)
    (state / "state.json").write_text("{")
    with pytest.raises(QuantizationError, match=r"state.json is damaged"):
        run(model, state_dir=state)


def test_a_state_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    make_model(tmp_path / "model")
    monkeypatch.setattr("trirun_gptq.run.resume.os.fsync", full)
    with pytest.raises(OSError) as caught:
        run(tmp_path / "model", state_dir=tmp_path / "state")
    assert caught.value.filename.startswith(str(tmp_path / "state"))


def test_other_weights_of_the_same_shapes_are_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr("trirun_gptq.run.resume.PIECE", 256)
    model, state = make_model(tmp_path / "model"), tmp_path / "state"
    run(model, state_dir=state)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"state of another run \(different weights\)"):
        run(model, state_dir=state)
