"""quantize, pack and finetune called by a program: plain arguments in, a report out."""

import pytest
from trirun_gptq.run.report import ModuleReport
from trirun_gptq.train.progress import Evaluated

from trirun_cli.errors import UsageError
from trirun_cli.workflows.finetune import finetune
from trirun_cli.workflows.pack import pack
from trirun_cli.workflows.quantize import quantize

pytestmark = pytest.mark.usefixtures("one_thread")


def test_quantize(trirun, plain_model, tmp_path):
    events = []
    settings = {"preset": "fast", "group_size": 64, "samples": 4, "seqlen": 64}
    report = quantize(plain_model, tmp_path / "Q", progress=events.append, **settings)
    command = ("--preset", "fast", "--group-size", "64", "--samples", "4", "--seqlen", "64")
    assert trirun("quantize", plain_model, "--out", tmp_path / "C", *command)[0] == 0
    mine, commands = ((tmp_path / name / "model.safetensors").read_bytes() for name in "QC")
    assert report.written and report.out == tmp_path / "Q" and mine == commands
    assert report.bits_per_weight == 2.25 and 0 < report.bytes_after < report.bytes_before and report.seconds > 0
    assert [event for event in events if isinstance(event, ModuleReport)] == report.modules
    assert events.index(report.plan) < events.index(report.run.memory) < events.index(report.blocks[0])
    assert report.held_out.perplexity > 1 and report.sample.prompt
    with pytest.raises(UsageError, match="unknown key 'grup_size'; did you mean 'group_size'"):
        quantize(plain_model, tmp_path / "R", grup_size=64)
    with pytest.raises(UsageError, match="--preset slow: one of fast, default, best"):
        quantize(plain_model, tmp_path / "R", preset="slow")


def test_pack(ternary_model, tmp_path):
    events = []
    report = pack(ternary_model, tmp_path / "T", progress=events.append)
    assert report.out == tmp_path / "T" and report.exact and report.scale_error == 0
    assert [event for event in events if event in report.modules] == report.modules and len(report.modules) == 14
    assert 2 < report.bits_per_weight < 2.3 and report.activation_bits == 16
    assert 0 < report.bytes_after < report.bytes_before and report.seconds > 0
    with pytest.raises(UsageError, match="--act-bits 4: 8 or 16"):
        pack(ternary_model, tmp_path / "U", activation_bits=4)


def test_finetune(plain_model, tmp_path):
    events = []
    settings = {"init": "nearest", "group_size": 64, "seqlen": 64, "batch": 4, "held_out": 4, "steps": 4}
    planned = finetune(plain_model, tmp_path / "F", dry_run=True, progress=events.append, **settings)
    assert not planned.written and planned.plan == events[-1] and not list(tmp_path.iterdir())
    report = finetune(plain_model, tmp_path / "F", evaluations=2, progress=events.append, **settings)
    assert report.written and report.steps == 4 and report.tokens == 4 * 4 * 64
    assert report.evaluations == [event.evaluation for event in events if isinstance(event, Evaluated)]
    assert report.best in report.evaluations and report.perplexity > report.original_perplexity > 1
    assert report.packed_perplexity == pytest.approx(report.trained_perplexity, rel=2e-3)
    assert 0 < report.bytes_after < report.bytes_before and report.bits_per_weight == 2.25
