"""End-to-end training of scales and codes, on a model small enough to run whole."""

from dataclasses import replace

import pytest
import torch
import transformers
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.run import memory
from trirun_gptq.run.progress import Stage
from trirun_gptq.whole import training

from tests.gptq.models import RECIPE, Log, Tensors, calibration, load_result, make_model, run

E2E = replace(RECIPE, e2e_steps=12, e2e_lr=5e-3)


def divergence(original, quantized, sequences):
    held_out = torch.stack(sequences[RECIPE.samples :])
    with torch.no_grad():
        before, after = (model(held_out).logits.log_softmax(-1) for model in (original, quantized))
    return float(torch.nn.functional.kl_div(after, before, reduction="sum", log_target=True)) / held_out.numel()


@pytest.mark.parametrize(("grid", "tied"), [("signed", True), ("zero", False), ("auto", False)])
def test_scales_move_and_codes_do_not(tmp_path, grid, tied):
    sequences = calibration()
    make_model(tmp_path, tie_word_embeddings=tied)
    plain, first, _ = run(tmp_path, replace(RECIPE, grid=grid), sequences)
    written, report, log = run(tmp_path, replace(E2E, grid=grid), sequences)
    assert "e2e" in log.stages and written.keys() == plain.keys()
    assert report.before_e2e.divergence == pytest.approx(first.predictions.divergence, rel=0.02)
    assert report.predictions.divergence < report.before_e2e.divergence
    scales = [name for name in written if name.endswith("weight_scale")]
    assert not all(torch.equal(written[name], plain[name]) for name in scales)
    assert all(torch.equal(written[name], plain[name]) for name in written if written[name].dtype == torch.int32)
    # The reported divergence is that of what was written.
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    measured = divergence(original, load_result(tmp_path, written, report), sequences)
    assert report.predictions.divergence == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["zero", "ternary"])
def test_codes_train_too(tmp_path, grid):
    # So little text teaches a random model nothing about other text.
    sequences = calibration(6)
    sequences += sequences[:2]
    make_model(tmp_path)
    plain, _, _ = run(tmp_path, replace(RECIPE, grid=grid), sequences)
    scales_alone, first, _ = run(tmp_path, replace(E2E, grid=grid), sequences)
    # The first steps undo what GPTQ compensated for; the others must make more than that good.
    recipe = replace(E2E, grid=grid, e2e_code_steps=120, e2e_code_lr=4e-2)
    written, report, _ = run(tmp_path, recipe, sequences)
    packed = [name for name in written if written[name].dtype == torch.int32]
    assert all(torch.equal(scales_alone[name], plain[name]) for name in packed)
    assert not all(torch.equal(written[name], plain[name]) for name in packed)
    assert report.before_e2e == first.before_e2e
    assert report.predictions.divergence < first.predictions.divergence
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    measured = divergence(original, load_result(tmp_path, written, report), sequences)
    assert report.predictions.divergence == pytest.approx(measured, rel=0.05)
    if grid == "ternary":
        weights = [
            load_result(tmp_path, written, report).get_submodule(module.name).weight for module in report.modules
        ]
        assert all(len(row[:32].abs().unique()) <= 2 for weight in weights for row in weight)


def test_codes_stay_where_they_do_not_fit(tmp_path, monkeypatch):
    make_model(tmp_path)
    scales_alone, first, _ = run(tmp_path, E2E)
    monkeypatch.setattr(memory, "CODE_BYTES", 1 << 50)
    log, written = Log(), Tensors()
    report = quantize_model(tmp_path, replace(E2E, e2e_code_steps=12), calibration(), written, log)
    assert any("too little memory to train all codes" in message for message in log.warnings)
    assert report.predictions == first.predictions
    assert all(torch.equal(written[name], scales_alone[name]) for name in written)


def test_a_rate_too_high_changes_nothing(tmp_path):
    make_model(tmp_path)
    plain, _, _ = run(tmp_path)
    written, report, _ = run(tmp_path, replace(E2E, e2e_lr=50.0))
    assert report.predictions == report.before_e2e
    assert all(torch.equal(written[name], plain[name]) for name in plain)


def test_batches_are_halved_when_the_whole_model_does_not_fit(tmp_path, monkeypatch):
    make_model(tmp_path)
    forward = training.predict

    def predict(skeleton, tokens):
        # The student's forward pass alone: the head's has stand-ins for blocks.
        if torch.is_grad_enabled() and len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(skeleton, tokens)

    monkeypatch.setattr(training, "predict", predict)
    log = Log()
    report = quantize_model(tmp_path, E2E, calibration(), Tensors(), log)
    assert [message for message in log.warnings if "out of GPU memory with 6 sequences" in message]
    assert report.predictions.divergence < report.before_e2e.divergence


@pytest.mark.slow
def test_a_run_killed_end_to_end_resumes_to_the_same_bytes(tmp_path):
    model, state = make_model(tmp_path / "model"), tmp_path / "state"
    whole, report, _ = run(model, E2E)

    class Killed(Exception):
        pass

    def kill(event):
        if isinstance(event, Stage) and event.name == "e2e" and event.done == 5:
            raise Killed

    with pytest.raises(Killed):
        quantize_model(model, E2E, calibration(), Tensors(), kill, state_dir=state)
    resumed, second, log = run(model, E2E, state_dir=state)
    assert all(block.resumed for block in log.blocks)
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert second.predictions == report.predictions
