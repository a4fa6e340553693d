"""``trirun finetune`` from the command line: a model in, a trained checkpoint out."""

import json
import subprocess
import sys

import pytest
import torch

from trirun_cli.checkpoint.model_dir import ModelDir
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.workflows import finetune_publish

SMALL = ("--group-size", "64", "--seqlen", "64", "--batch", "4", "--held-out", "4", "--precision", "fp32")
OPTIONS = (*SMALL, "--init", "nearest", "--steps", "12", "--evaluations", "3")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_model_becomes_ternary(trirun, plain_model, tmp_path):
    out = tmp_path / "F"
    code, text, _ = trirun("finetune", plain_model, "--out", out, *OPTIONS, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["schema"] == "trirun.finetune/1" and document["recipe"]["grid"] == "ternary"
    losses = [evaluation["kl"] for evaluation in document["evaluations"]]
    assert [evaluation["step"] for evaluation in document["evaluations"]] == [0, 4, 8, 12]
    assert losses[-1] < losses[0] and document["held_out"]["kl"] == min(losses)
    check = document["check"]
    assert check["packed_perplexity"] == pytest.approx(check["trained_perplexity"], rel=2e-3)
    assert trirun("verify", out)[0] == 0
    opened = Checkpoint(out)
    assert len(opened.modules) == 14 and opened.format.group_size == 64 and opened.format.activation_bits == 16
    assert [path.name for path in tmp_path.iterdir()] == ["F"]
    assert trirun("generate", "-c", out, "-p", "The sea", "-n", "4")[0] == 0


@pytest.mark.slow
def test_a_tied_embedding_trains_by_either_name(trirun, plain_model, stored_by_head, tmp_path):
    options = ("--out", tmp_path / "F", *OPTIONS, "--rest-lr", "1e-3")
    assert trirun("finetune", stored_by_head(plain_model), *options)[0] == 0
    before, after = (ModelDir(path).tensor("lm_head.weight") for path in (tmp_path / "copy", tmp_path / "F"))
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_a_two_bit_checkpoint_is_healed(trirun, plain_model, tmp_path):
    quantize = (
        "--preset",
        "fast",
        "--group-size",
        "64",
        "--samples",
        "4",
        "--seqlen",
        "64",
        "--override",
        "o_proj=zero",
    )
    assert trirun("quantize", plain_model, "--out", tmp_path / "Q", *quantize)[0] == 0
    command = ("finetune", plain_model, "--out", tmp_path / "F", "--init", tmp_path / "Q", *OPTIONS[:-6], "--json")
    code, text, _ = trirun(*command, "--steps", "10", "--evaluations", "2", "--lr", "3e-4")
    assert code == 0
    document = json.loads(text)
    assert document["evaluations"][-1]["kl"] < document["evaluations"][0]["kl"]
    assert document["bits_per_weight"] > 2.25 and document["recipe"]["grid"] != "ternary"
    healed, start = Checkpoint(tmp_path / "F"), Checkpoint(tmp_path / "Q")
    assert healed.format == start.format and healed.modules == start.modules
    module = "model.layers.0.mlp.up_proj"
    # The start's scales were the beginning, and the codes of all four levels are in use.
    before, after = start.packed(module).scales.float(), healed.packed(module).scales.float()
    assert not torch.equal(before, after) and torch.allclose(before, after, rtol=0.1)


@pytest.mark.parametrize(("method", "act_bits"), [("trilm", 16), ("bitnet", 8)])
def test_absmean_methods(trirun, plain_model, tmp_path, method, act_bits):
    small = (*SMALL[2:], "--steps", "6", "--evaluations", "1")
    code, text, _ = trirun("finetune", plain_model, "--method", method, "--out", tmp_path / "F", *small, "--json")
    assert code == 0
    evaluations = json.loads(text)["evaluations"]
    assert evaluations[-1]["kl"] < evaluations[0]["kl"]
    opened = Checkpoint(tmp_path / "F")
    assert opened.format.activation_bits == act_bits and opened.format.group_size == -1
    scales = opened.packed("model.layers.1.mlp.down_proj").scales
    assert bool((scales == scales.flatten()[0]).all())


@pytest.mark.slow
def test_memory_savers_change_nothing(trirun, plain_model, tmp_path):
    savers = ("--micro-batch", "2", "--gradient-checkpointing")
    kls = []
    for name, extra in (("A", ()), ("B", savers)):
        code, text, _ = trirun(
            "finetune", plain_model, "--out", tmp_path / name, *OPTIONS, "--steps", "4", *extra, "--json"
        )
        assert code == 0
        kls.append([evaluation["kl"] for evaluation in json.loads(text)["evaluations"]])
    assert kls[0] == pytest.approx(kls[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_float32(trirun, plain_model, tmp_path, precision):
    losses = {}
    for kind in ("fp32", precision):
        options = (*OPTIONS, "--steps", "4", "--precision", kind, "--json")
        code, text, _ = trirun("finetune", plain_model, "--out", tmp_path / kind, *options)
        assert code == 0
        losses[kind] = [evaluation["kl"] for evaluation in json.loads(text)["evaluations"]]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.05)


@pytest.mark.slow
def test_the_demo_model_heals_within_a_minute(trirun, demo_model, tmp_path):
    options = ("--init", "nearest", "--steps", "6", "--batch", "4", "--seqlen", "64", "--held-out", "8")
    code, text, _ = trirun("finetune", demo_model, "--out", tmp_path / "F", *options, "--evaluations", "1", "--json")
    assert code == 0
    document = json.loads(text)
    before, after = (evaluation["perplexity"] for evaluation in document["evaluations"])
    assert document["held_out"]["original_perplexity"] < after < 0.75 * before


@pytest.mark.slow
def test_two_processes_train_as_one(trirun, plain_model, tmp_path):
    code, text, _ = trirun("finetune", plain_model, "--out", tmp_path / "one", *OPTIONS, "--json")
    assert code == 0
    launch = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "trirun_cli",
    )
    command = (*launch, "finetune", plain_model, "--out", tmp_path / "two", *OPTIONS, "--device", "cpu", "--json")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    alone, together = (
        [evaluation["kl"] for evaluation in json.loads(out[out.index("{") :])["evaluations"]]
        for out in (text, done.stdout)
    )
    assert together == pytest.approx(alone, rel=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--method", "magic"), 2, "--method magic"),
        (("--grid", "ternery"), 2, "--grid ternery: unknown grid 'ternery'; did you mean 'ternary'"),
        (("--steps", "0"), 2, "--steps 0: steps=0: at least 1 is needed"),
        (("--batch", "6", "--micro-batch", "4"), 2, "--batch 6 --micro-batch 4: micro_batch=4 does not divide batch=6"),
        (("--kl", "0"), 2, "--kl 0: kl and ce are both 0"),
        (("--minutes", "-1"), 2, "--minutes -1: minutes=-1.0: a number of at least 0"),
        (("--seqlen", "4096"), 2, "context ends at 128"),
        (("--data", "nowhere.txt"), 3, "nowhere.txt: no such file"),
        (("--method", "trilm", "--grid", "ternary"), 2, "trilm begins at the original weights"),
        (("--init", "nowhere"), 3, "nowhere: no such directory"),
        (("--held-out", "100000"), 3, "held-out sequences"),
        (("--group-size", "128"), 3, "k=192 is not a multiple"),
    ],
)
def test_bad_input_is_one_clear_line(trirun, plain_model, tmp_path, options, code, message):
    found, out, err = trirun("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, *options)
    assert found == code and out == "" and message in " ".join(err.split())
    assert not (tmp_path / "F").exists()


@pytest.mark.slow
def test_nan_weights_are_named_by_a_dry_run(trirun, save_llama, tmp_path):
    def change(model):
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")

    code, _, err = trirun("finetune", save_llama(change), "--out", tmp_path / "F", *OPTIONS, "--dry-run")
    assert code == 3 and "up_proj.weight: 1 of 24576 values are NaN or infinite" in " ".join(err.split())


def test_a_loss_that_diverges_is_an_error(trirun, plain_model, tmp_path):
    code, _, err = trirun(
        "finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, "--rest-lr", "1e30", "--no-resume"
    )
    assert code == 3 and "the loss is not finite after step" in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_answers_otherwise_does_not_get_the_name(trirun, plain_model, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune_publish, "AGREEMENT", -1.0)
    code, _, err = trirun("finetune", plain_model, "--out", tmp_path / "F", *OPTIONS, "--steps", "2")
    assert code == 6 and "F.failed has perplexity" in " ".join(err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F.failed", "F.state"]


def test_a_packed_model_is_not_trained_further_by_itself(trirun, packed, tmp_path):
    code, _, err = trirun("finetune", packed, "--out", tmp_path / "F", *OPTIONS)
    assert code == 3 and "--init" in err
