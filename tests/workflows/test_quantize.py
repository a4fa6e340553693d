"""``trirun quantize`` from the command line: a model in, a checkpoint out, whole or not at all."""

import hashlib
import json
import signal
import subprocess
import sys

import pytest
from trirun_gptq.block.walk import BlockRun
from trirun_gptq.errors import QuantizationError
from trirun_kernels.native import NativeError

from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.workflows import quantize as workflow
from trirun_cli.workflows.quantize import load_calibration
from trirun_cli.workflows.quantize_plan import plan_quantize

OPTIONS = ("--preset", "fast", "--group-size", "64", "--samples", "4", "--seqlen", "64")


def digest(directory):
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def quantized(plain_model, tmp_path_factory):
    """What the command makes of the plain model, and its JSON document."""
    import contextlib
    import io

    from trirun_cli.commands import quantize

    out, document = tmp_path_factory.mktemp("quantized") / "Q", io.StringIO()
    with contextlib.redirect_stdout(document):
        quantize.command(plain_model, out, preset="fast", group_size=64, samples=4, seqlen=64, json=True)
    return out, json.loads(document.getvalue())


def test_the_report_and_the_checkpoint_agree(trirun, quantized):
    out, document = quantized
    assert document["schema"] == "trirun.quantize/1" and document["recipe"]["group_size"] == 64
    assert len(document["modules"]) == 14 and len(document["blocks"]) == 2
    assert all(0 < module["loss"] < 1 for module in document["modules"])
    assert document["held_out"]["perplexity"] > 1 and document["held_out"]["divergence"] > 0
    assert (document["planned_seconds"] is None) == all(
        s["planned_seconds"] is None for s in document["stages"].values()
    )
    assert document["sample"]["prompt"] and set(document["stages"]) >= {"embed", "hessian", "solve", "forward", "write"}
    assert document["bits_per_weight"] == 2.25 and document["bytes_after"] < document["bytes_before"]
    assert trirun("verify", out)[0] == 0
    opened = Checkpoint(out)
    assert sorted(module["name"] for module in document["modules"]) == opened.modules
    assert opened.format.group_size == 64 and opened.format.modules_to_not_convert == ["lm_head"]
    assert not out.with_name("Q.partial").exists() and not out.with_name("Q.state").exists()


def test_it_generates_and_stays_near_the_original(trirun, quantized, plain_model):
    out, _ = quantized
    code, text, _ = trirun("generate", "-c", out, "-p", "The sea", "-n", "8")
    assert code == 0 and text.startswith("The sea")
    _, text, _ = trirun("eval", "-c", out, "-m", plain_model, "--window", "64", "--limit", "4", "--json")
    # A random model predicts nothing, before or after: both sit near the vocabulary's 8192.
    results = json.loads(text)["results"]
    assert 4000 < results[0]["perplexity"] < 20000


@pytest.mark.parametrize(("error", "expected"), [(NativeError("no library here"), 0), (KeyError("a defect"), 1)])
def test_a_sample_that_cannot_be_shown_undoes_nothing(trirun, plain_model, tmp_path, monkeypatch, error, expected):
    def fail(*_):
        raise error

    monkeypatch.setattr(workflow, "write_sample", fail)
    code, text, _ = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, "--json")
    assert code == expected and (tmp_path / "Q" / "model.safetensors").exists()
    if expected == 0:
        assert json.loads(text)["sample"] is None


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--group-size", "7"), 2, "--group-size 7: "),
        (("--grid", "signd"), 2, "--grid signd: unknown grid 'signd'; did you mean 'signed'?"),
        (("--samples", "0"), 2, "--samples 0: samples=0: at least 1"),
        (("--override", "(=keep"), 2, "--override (=keep: '(' is not a regular expression"),
        (("--override", "nothing_here=keep"), 2, "'nothing_here' matches none of the model's modules"),
        (("--override", ".=keep"), 2, "none of the 14 linear layers in the decoder blocks is left to quantize"),
        (("--override", "down_proj=g0"), 2, "--override down_proj=g0: QuantSpec: group_size=0"),
        (("--override", "down_proj="), 2, "--override down_proj=: overrides['down_proj']: unknown grid ''"),
        (("--override", "down_proj=g--1"), 2, "unknown grid 'g--1'"),
        (("--calibration", "missing"), 3, "missing: no such file"),
    ],
)
def test_a_mistaken_option_is_named_before_the_plan(trirun, plain_model, tmp_path, options, code, words):
    found, _, err = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, *options)
    assert found == code and words in err and "linear" not in err.split(words)[0] and "→" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_calibration_text_the_excerpt_is_enough_for_every_preset(plain_model, tmp_path):
    def plan(preset, warnings, **settings):
        return plan_quantize(
            plain_model, tmp_path / "Q", preset=preset, recipe=None,
            settings={"group_size": 64, "samples": None} | settings,
            overrides=[], calibration=None, device="cpu", overwrite=False,
            progress=lambda event: warnings.append(event.message),
        )  # fmt: skip

    for preset, wanted in (("fast", 128), ("default", 256), ("best", 1024)):
        warnings: list[str] = []
        planned = plan(preset, warnings)
        samples = planned.recipe.samples
        assert len(load_calibration(planned)) == samples + planned.recipe.held_out
        assert samples == min(wanted, 135) and planned.recipe.seqlen == 512
        assert (f"({samples} sequences, recipe {preset!r} has {wanted})" in warnings[0]) == (samples < wanted)
    # A number that was asked for is kept, or refused.
    with pytest.raises(QuantizationError, match="272 sequences of 512 need 139264"):
        load_calibration(plan("default", [], samples=256))


@pytest.mark.slow
def test_overrides_reach_the_checkpoint(trirun, plain_model, tmp_path):
    overrides = ("--override", "down_proj=g32", "--override", "o_proj=zero", "--override", r"layers\.1\.mlp\.up=keep")
    code, _, _ = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, *overrides, "--json")
    assert code == 0
    opened = Checkpoint(tmp_path / "Q")
    assert opened.format.spec("model.layers.0.mlp.down_proj").group_size == 32
    assert opened.format.spec("model.layers.0.self_attn.o_proj").zero is None
    assert "model.layers.1.mlp.up_proj" in opened.format.modules_to_not_convert
    assert trirun("verify", tmp_path / "Q")[0] == 0
    # A layer that is not packed keeps the model off the native decoder, not from running.
    assert trirun("generate", "-c", tmp_path / "Q", "-p", "The sea", "-n", "4")[0] == 0


@pytest.mark.slow
def test_a_stopped_run_continues_to_the_same_bytes(trirun, quantized, plain_model, tmp_path, monkeypatch):
    command = ("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS)
    run, finished = BlockRun.run, []

    def stop_at_the_second(self):
        if self.index == 1:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(BlockRun, "run", stop_at_the_second)
    code, _, err = trirun(*command)
    assert code == 130 and "the same command continues" in err and "Q.state" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Q.state"]

    def count(self):
        finished.append(self.index)
        return run(self)

    monkeypatch.setattr(BlockRun, "run", count)
    code, _, err = trirun(*command)
    assert code == 0 and finished == [1] and "taken from the stopped run" in err
    assert digest(tmp_path / "Q") == digest(quantized[0])
    assert [path.name for path in tmp_path.iterdir()] == ["Q"]


def test_a_dry_run_tells_the_plan_and_leaves_nothing(trirun, plain_model, tmp_path):
    code, text, err = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, "--dry-run", "--json")
    document = json.loads(text)
    assert code == 0 and document["schema"] == "trirun.quantize-plan/1" and list(tmp_path.iterdir()) == []
    assert document["memory"]["fits"] and document["memory"]["planned_bytes"] < document["memory"]["free_bytes"]
    assert document["rehearsal"]["seconds"] > 0
    assert "memory plan" in err and "preflight" in err


def test_a_run_that_fails_says_what_it_leaves_and_only_its_like_continues(trirun, plain_model, tmp_path, monkeypatch):
    command, run = ("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS), BlockRun.run

    def fail_at(index):
        def fail(self):
            if self.index == index:
                raise QuantizationError("no more")
            return run(self)

        monkeypatch.setattr(BlockRun, "run", fail)

    # One that has finished no block leaves nothing that could be in the way of another.
    fail_at(0)
    code, _, err = trirun(*command)
    assert code == 3 and "no more" in err and "kept" not in err and list(tmp_path.iterdir()) == []
    fail_at(1)
    code, _, err = trirun(*command)
    assert code == 3 and "Q.state, the same command continues" in err and "--no-resume" in err
    code, _, err = trirun(*command, "--seed", "5")
    assert code == 3 and "state of another run" in err and "continues" not in err and not (tmp_path / "Q").exists()
    assert "--overwrite removes that state; --no-resume starts over" in " ".join(err.split())
    monkeypatch.setattr(BlockRun, "run", run)
    assert trirun(*command, "--seed", "5", "--no-resume")[0] == 0 and (tmp_path / "Q.state").exists()
    code, _, err = trirun(*command, "--seed", "5", "--overwrite")
    assert code == 0 and "stopped run" not in err and [path.name for path in tmp_path.iterdir()] == ["Q"]


KILLED = """
import os, signal, sys
from pathlib import Path
from trirun_cli.commands import quantize
from trirun_gptq.run.resume import RunState

save = RunState.save

def save_and_die(state, index, result):
    save(state, index, result)
    os.kill(os.getpid(), signal.SIGKILL)

RunState.save = save_and_die
quantize.command(Path(sys.argv[1]), Path(sys.argv[2]), preset="fast", group_size=64, samples=4, seqlen=64, quiet=True)
"""


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_files(trirun, quantized, plain_model, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, plain_model, tmp_path / "Q"], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "Q").exists() and (tmp_path / "Q.state" / "block-0000.safetensors").exists()
    code, _, err = trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS)
    assert code == 0 and err.count("taken from the stopped run") == 1
    whole, continued = (
        {file.name: file.read_bytes() for file in out.iterdir()} for out in (quantized[0], tmp_path / "Q")
    )
    assert continued == whole


def test_nan_weights_are_an_error_that_names_them(trirun, save_llama, tmp_path):
    def change(model):
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")

    code, _, err = trirun("quantize", save_llama(change), "--out", tmp_path / "Q", *OPTIONS, "--no-resume")
    assert (
        code == 3
        and "model.layers.1.mlp.up_proj.weight: 1 of 24576 values are NaN" in err
        and list(tmp_path.iterdir()) == []
    )


def test_two_grids_in_one_model_run_on_the_same_engine(trirun, plain_model, tmp_path):
    options = ("--grid", "midrise", "--override", "down_proj=signed", "--json")
    assert trirun("quantize", plain_model, "--out", tmp_path / "Q", *OPTIONS, *options)[0] == 0
    opened = Checkpoint(tmp_path / "Q")
    assert opened.format.spec("model.layers.0.mlp.down_proj").zero == 1.0
    assert opened.format.spec("model.layers.0.mlp.up_proj").zero == 1.5
    assert trirun("verify", tmp_path / "Q")[0] == 0
    generate = ("generate", "-c", tmp_path / "Q", "-p", "The sea", "-n", "8", "--act-bits", "16", "--engine")
    native, whole = trirun(*generate, "native"), trirun(*generate, "transformers")
    assert native[0] == whole[0] == 0 and native[1] == whole[1]


@pytest.mark.slow
def test_a_mixture_of_experts_from_end_to_end(trirun, plain_model, tmp_path):
    import shutil

    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, max_position_embeddings=128, tie_word_embeddings=True)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    for file in plain_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "moe")
    code, text, _ = trirun("quantize", tmp_path / "moe", "--out", tmp_path / "Q", *OPTIONS, "--json")
    document = json.loads(text)
    assert code == 0 and len(document["modules"]) == 2 * (4 + 4 * 3)
    assert all(module["tokens"] > 0 for module in document["modules"] if ".experts." not in module["name"])
    assert trirun("verify", tmp_path / "Q")[0] == 0
    generate = ("generate", "-c", tmp_path / "Q", "-p", "The sea", "-n", "4", "--act-bits", "16", "--engine")
    native, whole = trirun(*generate, "native"), trirun(*generate, "transformers")
    assert native[0] == whole[0] == 0 and native[1] == whole[1] and whole[1].startswith("The sea")
    # A random model predicts nothing; what is compared is that both are the same nothing, near the vocabulary's size.
    evaluate = ("eval", "-c", tmp_path / "Q", "-m", tmp_path / "moe", "--window", "64", "--limit", "2", "--json")
    code, text, _ = trirun(*evaluate)
    assert code == 0 and 7000 < json.loads(text)["results"][0]["perplexity"] < 9500
