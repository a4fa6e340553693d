"""The comparison with the original after the last block: rehearsed before the first, and never at the blocks' cost."""

from dataclasses import replace

import pytest
import torch
import transformers
from trirun_gptq import pipeline
from trirun_gptq.block.walk import BlockRun
from trirun_gptq.errors import QuantizationError

from tests.gptq.models import RECIPE, SIZES, calibration, make_model, run


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("bloom", {"n_head": 4}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
        ("codegen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 64}),
        ("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("ctrl", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 96}),  # tied, with a bias
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_models_whose_blocks_answer_with_tuples_or_lists(tmp_path, family, extra, steps):
    """Their classes take a tensor for a tuple, and its first sequence for the hidden states."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | extra))
    model = transformers.AutoModelForCausalLM.from_config(config)
    if (bias := model.get_output_embeddings().bias) is not None:
        bias.data.normal_()
    model.save_pretrained(tmp_path)
    sequences = calibration()
    _, report, log = run(tmp_path, replace(RECIPE, e2e_steps=steps), sequences)
    held_out = torch.stack(sequences[RECIPE.samples :])
    with torch.no_grad():
        logits = model.eval()(held_out).logits[:, :-1].log_softmax(-1)
    wanted = torch.nn.functional.nll_loss(logits.flatten(0, 1), held_out[:, 1:].flatten())
    assert report.predictions.original_perplexity == pytest.approx(float(wanted.exp()), rel=0.01)
    assert not log.warnings


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_head_that_cannot_be_run_is_refused_before_the_first_block(tmp_path, monkeypatch, dry_run):
    def fail(self, *args, **kwargs):
        raise IndexError("too many indices")

    def begun(self):
        raise AssertionError

    make_model(tmp_path)
    monkeypatch.setattr("trirun_gptq.whole.head.predict", fail)
    monkeypatch.setattr(BlockRun, "run", begun)
    with pytest.raises(QuantizationError, match=r"its head does not take .*\(IndexError: too many indices\)"):
        run(tmp_path, dry_run=dry_run)


def test_a_comparison_that_fails_costs_no_block(tmp_path, monkeypatch):
    def fail(*_):
        raise IndexError("too many indices")

    make_model(tmp_path)
    whole, _, _ = run(tmp_path)
    monkeypatch.setattr(pipeline, "compare", fail)
    written, report, log = run(tmp_path)
    assert written.keys() == whole.keys() and all(torch.equal(written[name], whole[name]) for name in whole)
    assert report.predictions is None and len(report.blocks) == 2
    assert log.warnings == [
        "the result was not compared with the original on held-out text: IndexError: too many indices"
    ]


def test_blocks_whose_end_to_end_training_failed_are_kept_for_another_end(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no more")

    model, state = make_model(tmp_path / "model"), tmp_path / "state"
    whole, _, _ = run(model)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no more"):
        patched.setattr(pipeline, "tune", fail)
        run(model, replace(RECIPE, e2e_steps=2, e2e_lr=1e-3), state_dir=state)
    written, _, log = run(model, state_dir=state)
    assert [block.resumed for block in log.blocks] == [True, True]
    assert all(torch.equal(written[name], whole[name]) for name in whole)
