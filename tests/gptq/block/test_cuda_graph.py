"""Training steps as CUDA graphs: which can be, and that they train as plain ones do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from trirun_gptq.block import optim, reconstruct
from trirun_gptq.block.cuda_graph import KINDS, LAUNCH_BOUND, CannotRecord, Recorded, recordable
from trirun_gptq.model import activations
from trirun_gptq.model.activations import Batch, Placement
from trirun_gptq.whole import training
from trirun_kernels.weights.experts import SeparateExperts

from tests.gptq.models import RECIPE, Log, Tensors, calibration, make_model, quantize_model

needs_gpu = pytest.mark.gpu
TRAINED = replace(
    RECIPE, samples=12, refine_steps=40, refine_lr=2e-3, engines=("ste", "gumbel"), e2e_steps=24, e2e_code_steps=24
)


def batches(count=3, device="cuda", length=8):
    place, calls = Placement(torch.device(device), torch.device(device)), [((), {})]
    return [Batch(place, i, torch.zeros(2, length, dtype=torch.int64), calls, None, None) for i in range(count)]


def test_only_steps_of_few_kinds_are_recorded(monkeypatch):
    block, order = nn.Linear(4, 4), [[0], [1], [2]]
    assert recordable(batches(), order, [block])
    assert not recordable(batches(device="cpu"), order, [block])
    assert not recordable(batches(), [[0, 1], [2]], [block])
    shared = [replace(batch, calls=[((), {"shared": {}})]) for batch in batches()]
    assert not recordable(shared, order, [block])
    # The last batch of a text is shorter; or of the same shape, but with another mask.
    assert recordable([*batches(2), *batches(1, length=9)], order, [block])
    others = [replace(batches(1)[0], calls=[((), {})]) for _ in range(KINDS)]
    assert recordable(others, [[i] for i in range(KINDS)], [block])
    assert not recordable([*others, *batches(1)], [[i] for i in range(KINDS + 1)], [block])
    assert not recordable(batches(), order, [nn.Linear(LAUNCH_BOUND, 1, device="meta"), block])
    assert not recordable(batches(), order, [SeparateExperts.__new__(SeparateExperts)])


def test_a_model_that_cannot_be_recorded_is_trained_all_the_same(tmp_path, monkeypatch):
    make_model(tmp_path)
    recipe = replace(TRAINED, refine_steps=6, e2e_steps=4, e2e_code_steps=4)

    def quantized(log):
        written = Tensors()
        quantize_model(tmp_path, recipe, calibration(14), written, log)
        return written

    plain = quantized(Log())

    class Refusing:
        def __init__(self, step, device, generator=None):
            pass

        def __call__(self, *inputs):
            raise CannotRecord("a stranger synchronizes")

    for module in (reconstruct, training):
        monkeypatch.setattr(module, "recordable", lambda *_: True)
        monkeypatch.setattr(module, "Recorded", Refusing)
    log = Log()
    written = quantized(log)
    assert [message for message in log.warnings if "a stranger synchronizes" in message] == [
        "training steps are launched kernel by kernel, more slowly: a stranger synchronizes"
    ]
    assert all(torch.equal(written[name], plain[name]) for name in plain)


@needs_gpu
def test_recorded_steps_follow_inputs_rates_and_noise():
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.zeros(4, device="cuda")
    rate = torch.ones((), device="cuda")

    def step(batch, x):
        noise = torch.empty_like(x).exponential_(generator=generator)
        weight.add_(rate * (x + noise).reshape(-1, 4).sum(0) + batch.first)

    def result(take):
        weight.zero_()
        generator.manual_seed(1)
        kinds = batches(1), batches(1, length=9)
        for i in range(24):
            rate.fill_(1.0 + i)
            # Two kinds of batches, now this one, now that one: inputs of 4 and of 8 values.
            kind = i % 3 % 2
            take(kinds[kind][0], torch.full((4 + 4 * kind,), float(i), device="cuda"))
        return weight.clone()

    torch.testing.assert_close(result(Recorded(step, torch.device("cuda"), generator)), result(step))


@needs_gpu
def test_what_waits_for_the_gpu_cannot_be_recorded():
    take = Recorded(lambda _, x: x.sum().item(), torch.device("cuda"))
    with pytest.raises(CannotRecord):
        for _ in range(8):
            take(batches(1)[0], torch.ones(2, device="cuda"))
    assert float(torch.ones(2, device="cuda").sum()) == 2


@needs_gpu
def test_recorded_training_is_training(tmp_path, monkeypatch):
    make_model(tmp_path)
    log, answers = Log(), []
    sequences = calibration(13)
    # Batches of four, four and three.
    for module in (activations, optim):
        monkeypatch.setattr(module, "BATCH_TOKENS", 4 * len(sequences[0]))

    def quantized(answer):
        for module in (reconstruct, training):
            monkeypatch.setattr(module, "recordable", answer)
        recipe = replace(TRAINED, samples=11)
        return quantize_model(tmp_path, recipe, sequences, Tensors(), log, device="cuda")

    def honest(*arguments):
        answers.append(recordable(*arguments))
        return answers[-1]

    recorded, plain = quantized(honest), quantized(lambda *_: False)
    assert answers and all(answers) and not any("kernel by kernel" in message for message in log.warnings)
    for mine, other in zip(recorded.blocks, plain.blocks, strict=True):
        assert mine.error == pytest.approx(other.error, rel=0.02) and mine.method == other.method
    assert recorded.predictions.divergence == pytest.approx(plain.predictions.divergence, rel=0.02)
