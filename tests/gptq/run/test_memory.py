"""The memory plan, the preflight, and what happens when memory runs out all the same."""

from dataclasses import replace

import pytest
import torch
from trirun_gptq.block import walk as block
from trirun_gptq.model.loader import Skeleton, TensorSource
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.run import memory

from tests.gptq.models import RECIPE, Log, Tensors, calibration, make_model, run


def plan(directory, free, monkeypatch, recipe=RECIPE, tokens=1 << 20, device="cpu"):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    return memory.plan_memory(Skeleton(TensorSource(directory)), recipe, tokens, torch.device(device))


def test_activations_wait_where_there_is_room(tmp_path, monkeypatch):
    make_model(tmp_path)
    roomy = plan(tmp_path, 1 << 40, monkeypatch, device="cuda")
    assert roomy.place.dtype == torch.float32 and roomy.place.store.type == "cuda" and roomy.fits
    assert roomy.streams == 4 * (1 << 20) * 64 * 4
    tight = plan(tmp_path, int((roomy.working + roomy.streams * 0.7) / 0.9), monkeypatch, device="cuda")
    assert tight.place.dtype == torch.bfloat16 and tight.place.store.type == "cuda" and tight.fits
    tighter = plan(tmp_path, int(roomy.working / 0.9) + 1, monkeypatch, device="cuda")
    assert tighter.place.dtype == torch.bfloat16 and tighter.place.store.type == "cpu" and tighter.fits
    assert not plan(tmp_path, roomy.working // 2, monkeypatch, device="cuda").fits
    # There is nowhere further away than a CPU's own memory.
    assert plan(tmp_path, roomy.working // 2, monkeypatch).place.store.type == "cpu"


def test_the_plan_counts_what_the_recipe_does(tmp_path, monkeypatch):
    make_model(tmp_path)
    plans = [
        plan(tmp_path, 1 << 40, monkeypatch, replace(RECIPE, **settings))
        for settings in ({}, {"refine_steps": 1}, {"refine_steps": 1, "engines": ("gumbel",)}, {"e2e_steps": 1})
    ]
    assert plans[0].refine == 0 < plans[1].refine < plans[2].refine and plans[2].e2e == 0 < plans[3].e2e


def test_what_the_program_holds_is_told_beside_what_the_run_takes(tmp_path, monkeypatch):
    make_model(tmp_path)
    on_cpu, on_gpu = (plan(tmp_path, 1 << 40, monkeypatch, device=device) for device in ("cpu", "cuda"))
    assert on_cpu.held > 100 << 20 and on_gpu.held == 0
    assert on_cpu.peak == on_cpu.held + max(on_cpu.total, on_cpu.compare + on_cpu.waiting)
    # The logits of a micro-batch of 4096 tokens, and the models' own embeddings.
    vocabulary = Skeleton(TensorSource(tmp_path)).model.config.vocab_size
    assert on_cpu.compare > 5 * 4096 * vocabulary * 4


def test_of_many_experts_only_the_chosen_ones_run(tmp_path, monkeypatch):
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    few, many = (
        plan(make_model(tmp_path / str(count), "Qwen3Moe", num_experts=count, **sizes), 1 << 40, monkeypatch)
        for count in (4, 16)
    )
    # Four times the weights, the waiting Hessians and codes on two grids; activations and each solve stay as they are.
    weights = 12 * (2 * 64 * 32 + 64 * 32)
    assert many.block - few.block == pytest.approx(2 * 4 * weights, rel=0.02)
    assert many.solve - few.solve <= 4 * 12 * (2 * 64 * 64 + 32 * 32) + 2 * weights


def test_bfloat16_activations_change_little(tmp_path, monkeypatch):
    make_model(tmp_path)
    _, exact, _ = run(tmp_path)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    _, coarse, _ = run(tmp_path)
    assert exact.memory.place.dtype == torch.float32 and coarse.memory.place.dtype == torch.bfloat16
    assert coarse.blocks[-1].error == pytest.approx(exact.blocks[-1].error, rel=0.2)
    assert coarse.blocks[-1].error != exact.blocks[-1].error


def limited(monkeypatch, rows):
    """A block that has memory for so many sequences at a time."""
    forward = block.run_block

    def run_block(module, index, batch, **stream):
        if index == 1 and len(batch.tokens) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(module, index, batch, **stream)

    monkeypatch.setattr(block, "run_block", run_block)


@pytest.mark.parametrize("refine_steps", [0, 4])
def test_batches_are_halved_until_they_fit(tmp_path, monkeypatch, refine_steps):
    make_model(tmp_path, num_hidden_layers=3)
    recipe = replace(RECIPE, refine_steps=refine_steps)
    _, whole, _ = run(tmp_path, recipe)
    limited(monkeypatch, 2)
    log, written = Log(), Tensors()
    report = quantize_model(tmp_path, recipe, calibration(), written, log)
    # Six sequences at a time, then three, then two and one.
    assert [message.split(";")[0] for message in log.warnings if "memory" in message] == [
        f"out of GPU memory with {count} sequences at a time" for count in (6, 3)
    ]
    assert len(report.blocks) == 3 and len(report.modules) == 21
    assert report.blocks[2].error == pytest.approx(whole.blocks[2].error, rel=0.1)


def test_a_single_sequence_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    make_model(tmp_path)
    limited(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path)


def test_a_dry_run_tries_one_block_and_writes_nothing(tmp_path):
    make_model(tmp_path)
    written, report, log = run(tmp_path, replace(RECIPE, refine_steps=100), dry_run=True)
    assert not written and not report.blocks and not log.blocks
    assert report.preflight.seconds > 0 and report.preflight.device_bytes == 0
    assert report.memory.total > 0


def test_files_stay_open_for_one_block_only(tmp_path):
    make_model(tmp_path)
    source = TensorSource(tmp_path)
    skeleton = Skeleton(source)
    tensor = source.read("model.norm.weight")
    assert source._maps
    block = skeleton.load_block(0, torch.device("cpu"))
    # What was read outlives the file it came from.
    assert (
        not source._maps
        and bool(torch.isfinite(tensor).all())
        and all(bool(torch.isfinite(p).all()) for p in block.parameters())
    )


def test_codes_train_end_to_end_only_where_there_is_room(tmp_path, monkeypatch):
    make_model(tmp_path)
    recipe = replace(RECIPE, e2e_code_steps=1)
    roomy = plan(tmp_path, 1 << 40, monkeypatch, recipe)
    assert roomy.trains_codes and not roomy.recomputes and roomy.e2e > 0
    needed = (roomy.e2e + roomy.e2e_codes + roomy.waiting) / memory.USABLE
    assert plan(tmp_path, int(needed) + 1, monkeypatch, recipe).trains_codes
    assert not plan(tmp_path, int(needed) - 2, monkeypatch, recipe).trains_codes
    assert not plan(tmp_path, 1 << 40, monkeypatch, replace(RECIPE, e2e_steps=1)).trains_codes
