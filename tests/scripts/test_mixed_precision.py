"""scripts/mixed_precision.py on a CPU: every mode learns the same, counts its memory, and survives an overflow."""

import gzip
import json

import mixed_precision
import pytest
import torch
from mixed_precision import MODES, LossScale, Trainer, main, mnist, prototypes, start_weights

SMALL = ("--device", "cpu", "--batch", "16", "--hidden", "24", "--steps", "6", "--lr", "0.1")


def test_every_mode_learns_the_same(capsys):
    assert main([*SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    by_mode = {result["mode"]: result for result in document["results"]}
    assert list(by_mode) == list(MODES)
    reference = by_mode["fp32"]["losses"]
    assert reference[-1] < reference[0] - 0.1, "it learns"
    for mode, result in by_mode.items():
        tolerance = 1e-6 if mode == "tf32" else 0.05 if mode == "bf16" else 0.01
        assert result["losses"] == pytest.approx(reference, abs=tolerance), mode
        assert result["ms_per_step"] > 0 and result["skipped"] == 0


def test_memory_is_what_the_tensors_hold(capsys):
    main([*SMALL, "--json", "--modes", "fp32,fp16"])
    wide, half = json.loads(capsys.readouterr().out)["results"]
    parameters = 24 * 784 + 24 + 10 * 24 + 10
    assert (wide["weights"], wide["masters"]) == (4 * parameters, 0)
    assert (half["weights"], half["masters"]) == (2 * parameters, 4 * parameters)
    assert wide["activations"] == 2 * half["activations"] == 4 * 16 * (784 + 24 + 10)
    assert wide["gradients"] == 2 * half["gradients"] == 4 * (16 * (24 + 10) + parameters)


def test_gradients_are_autograd_s():
    generator = torch.Generator().manual_seed(0)
    start = start_weights(24, torch.device("cpu"), generator)
    ((x, labels),) = prototypes(16, 1, generator)
    trainer = Trainer(MODES["fp32"], start, lr=1.0)
    loss = trainer.step(x, labels)
    w1, b1, w2, b2 = leaves = [p.clone().requires_grad_() for p in start]
    expected = torch.nn.functional.cross_entropy((x @ w1.t() + b1).relu() @ w2.t() + b2, labels)
    torch.testing.assert_close(loss, expected)
    for before, after, leaf in zip(start, trainer.weights, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(before - after, leaf, rtol=1e-4, atol=1e-6)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    generator = torch.Generator().manual_seed(0)
    trainer = Trainer(MODES["fp16"], start_weights(24, torch.device("cpu"), generator), lr=0.1)
    ((x, labels),) = prototypes(16, 1, generator)
    trainer.scale.value.fill_(2.0**24)
    before = [w.clone() for w in trainer.weights]
    trainer.step(x.half(), labels)
    assert trainer.scale.skipped == 1 and trainer.scale.value == 2.0**23
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.weights, strict=True))
    while trainer.scale.skipped == 1 + round(23 - trainer.scale.value.log2().item()):
        trainer.step(x.half(), labels)
        assert trainer.scale.value > 1
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.weights, strict=True))


def test_a_calm_doubles_the_scale():
    scale = LossScale(torch.device("cpu"), start=4.0, calm=3)
    for _ in range(3):
        assert scale.accepts([torch.ones(2)])
    assert scale.value == 8.0
    assert not scale.accepts([torch.ones(2), torch.tensor([torch.inf])]) and scale.value == 4.0
    for _ in range(3):
        assert scale.accepts([torch.ones(2)])
    assert scale.value == 8.0 and scale.skipped == 1, "the calm begins again behind an overflow"


def test_mnist_files_with_and_without_gz(tmp_path):
    images = torch.randint(0, 256, (5, 784), dtype=torch.uint8)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images.numpy().tobytes()))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(bytes(8) + bytes([3, 1, 4, 1, 5]))
    batches = list(mnist(tmp_path, 2, 7))
    assert [labels.tolist() for _, labels in batches] == [[3, 1], [4, 1]]
    torch.testing.assert_close(batches[1][0], images[2:4].float() / 127.5 - 1)


def test_table_and_wrong_mode(capsys):
    assert main([*SMALL, "--modes", "fp32,bf16"]) == 0
    out = capsys.readouterr().out
    assert "batch 16" in out and "| bf16 |" in out and "ms/step" in out
    with pytest.raises(SystemExit):
        main(["--modes", "fp8"])
    assert "fp8" in capsys.readouterr().err and mixed_precision.PIXELS == 784
