"""trirun bench model: what takes part, the check before timing, the table, the JSON document."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.decoder.weights import PackedArrays
from trirun_kernels.weights.spec import QuantSpec

from tests.small_models import FAMILIES, SIZES
from trirun_cli.bench import models as model_bench
from trirun_cli.bench.cpu_contestant import CpuContestant, dense_llama, random_weights, weight_bytes
from trirun_cli.bench.models import check, run
from trirun_cli.bench.shapes import decoder_shape_named, load_decoder_shapes
from trirun_cli.errors import CheckFailed, UsageError
from trirun_cli.models.description import decoder_shape
from trirun_cli.workflows.pack import pack

QUICK = ("--batch", "1,2", "--context", "24", "--seconds", "0.001", "--device", "cpu", "-q")


class Mock:
    """A contestant whose steps take what they are told to take, in seconds."""

    settle_s = 0.0

    def __init__(self, name, prefill, step, logits=(1.0, 2.0)):
        self.name, self.weight_bytes, self._times, self._logits = name, 100, (prefill, step), logits
        self.cells = []

    def logits(self, tokens):
        return list(self._logits)

    def room(self, batch, context):
        return 1, 2

    def open(self, batch, context):
        self.cells.append((batch, context))
        return tuple(lambda seconds=seconds: seconds for seconds in self._times)


def test_rates_and_ratios_follow_from_the_times():
    contestants = [Mock("int2", 0.5, 0.001), Mock("float16", 0.4, 0.003)]
    cells = list(run(contestants, [1, 32], [128], seconds=0))
    assert contestants[0].cells == contestants[1].cells == [(1, 128), (32, 128)]
    facts = cells[1].document()
    assert facts["int2"]["decode_tokens_per_s"] == pytest.approx(32000)
    assert facts["float16"]["prefill_tokens_per_s"] == pytest.approx(320)
    assert facts["int2"]["inter_token_latency_ms"] == pytest.approx(1) and facts["int2"]["inter_token_spread_ms"] == 0
    assert facts["decode_speedup"] == pytest.approx(3) and facts["prefill_speedup"] == pytest.approx(0.8)
    contestants.append(Mock("int2, int8 cache", 0.5, 0.0005))
    facts = next(run(contestants, [32], [128], seconds=0)).document()
    assert facts["decode_speedup"] == facts["int2"]["decode_speedup"] == pytest.approx(3)
    assert facts["int2, int8 cache"]["decode_speedup"] == pytest.approx(6)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_a_shape_of_any_family_runs_on_a_cpu(family):
    shape = decoder_shape({"model_type": family} | SIZES | FAMILIES[family])
    weights = random_weights(shape, QuantSpec(-1, 1.0), positions=64)
    contestant = CpuContestant("int2", weights, act_bits=16, threads=1)
    logits = contestant.logits([3, 5, 7])
    assert len(set(logits)) > 90 and torch.tensor(logits).isfinite().all()
    assert all(seconds() > 0 for seconds in contestant.open(2, 16))
    # Two bits a weight, and what is no matrix of a layer.
    packed = sum(n * k for layer in shape.layers for n, k in layer.linear_sizes(shape.hidden).values()) / 4
    assert weight_bytes(weights) > packed


def test_what_runs_before_a_turn_does_not_count(monkeypatch):
    clock = 0.0
    monkeypatch.setattr(model_bench.time, "perf_counter", lambda: clock)

    class Heated(Mock):
        """Slow at first, as a device is that another one has heated."""

        settle_s = 2.0

        def open(self, batch, context):
            def run():
                nonlocal clock
                self.warm = self.warm + 1 if heated[-1] == self.name else 1
                heated.append(self.name)
                taken = 1.0 if self.warm <= 2 else 0.5
                clock += taken
                return taken

            return run, run

        warm = 0

    heated = [""]
    cell = next(run([Heated("int2", 0, 0), Heated("float16", 0, 0)], [1], [128], seconds=3))
    assert {(s.prefill_s, s.step_s) for s in cell.speeds.values()} == {(0.5, 0.5)}


def test_nothing_wrong_is_timed():
    right = Mock("float16", 1, 1)
    close, closer = Mock("int2", 1, 1, (1.0, 2.01)), Mock("float16, int8 cache", 1, 1, (1.0, 2.001))
    errors = check([close, right, closer], 10)
    assert errors == {"int2": pytest.approx(0.00447, rel=0.01), closer.name: pytest.approx(0.000447, rel=0.01)}
    assert check([close], 10) == {}
    for logits, message in (((1.0, 3.0), "differ by"), ((1.0, float("nan")), "not finite")):
        with pytest.raises(CheckFailed, match=message):
            check([Mock("int2", 1, 1, logits), right], 10)
        with pytest.raises(CheckFailed, match=message):
            check([close, right, Mock("int2, int8 cache", 1, 1, logits)], 10)


def test_every_listed_decoder_can_run():
    shapes = load_decoder_shapes()
    for name, shape in shapes.items():
        assert shape.hidden % 64 == 0 and all(layer.feed_forward.size % 64 == 0 for layer in shape.layers), name
        assert all(mixer.heads % mixer.kv_heads == 0 for mixer in shape.attentions), name
    assert decoder_shape_named("llama-2-7b") == shapes["llama-2-7b"]
    for name in ("llama-9", "llama-9-as-llama"):
        with pytest.raises(UsageError, match="not one of llama-2-7b"):
            decoder_shape_named(name)


def test_llamas_of_other_decoders_sizes():
    assert decoder_shape_named("llama-2-7b-as-llama") == decoder_shape_named("llama-2-7b")
    sizes = {"layers": 24, "hidden": 2880, "ffn": 4 * 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088}
    assert decoder_shape_named("gpt-oss-20b-as-llama") == DecoderShape.uniform(**sizes)
    assert len(decoder_shape_named("qwen3.5-27b-as-llama").attentions) == 64


def test_dense_twin_on_the_cpu_is_the_same_model():
    shape = DecoderShape.uniform(layers=2, hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32, vocab=96)
    weights = random_weights(shape, QuantSpec(32, 1.0), positions=64)
    from trirun_kernels.decoder import reference as decoder_reference

    tokens = torch.arange(20)
    expected = decoder_reference.forward(weights, tokens)
    with torch.inference_mode():
        found = dense_llama(weights, torch.float32)(tokens.unsqueeze(0)).logits[0]
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.filterwarnings("error::FutureWarning")
def test_shape_on_the_cpu(trirun):
    code, out, _ = trirun("bench", "model", "--shape", "tiny", *QUICK, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.bench.model/1"
    assert document["weight_bytes"]["int2"] < document["weight_bytes"]["bfloat16"]
    assert 0 < document["logit_difference"] < 0.05
    assert [(cell["batch"], cell["context"]) for cell in document["results"]] == [(1, 24), (2, 24)]
    for cell in document["results"]:
        for name in ("int2", "bfloat16"):
            assert all(value >= 0 for value in cell[name].values()) and cell[name]["decode_tokens_per_s"] > 0


def test_checkpoint_on_the_cpu(trirun, demo_model, tmp_path):
    """Of random ternary weights in the demo model's shape."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(torch.randint(-1, 2, module.weight.shape) * 2.0**-4)
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    code, out, err = trirun("bench", "model", str(tmp_path / "packed"), *QUICK)
    assert code == 0, err
    assert "tokens/s" in out and "first token ms" in out and "bfloat16" in out
    code, _, err = trirun("bench", "model", str(tmp_path / "model"), *QUICK)
    assert code == 3 and "packed" in err


def test_bytes_of_a_model_whose_embedding_is_packed_too():
    weights = random_weights(decoder_shape_named("tiny"), QuantSpec(-1, 1.0), positions=8)
    dense = weight_bytes(weights)
    packed = weights.layers[0].gate.weight
    arrays = PackedArrays(packed.words.numpy(), packed.scales.numpy(), None, packed.n, packed.k, packed.spec)
    both = dataclasses.replace(weights, embedding=arrays, head=arrays)
    own = packed.words.nbytes + packed.scales.nbytes
    assert weight_bytes(both) == dense - weights.embedding.nbytes - weights.head.nbytes + own


def test_plot(trirun, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = trirun("bench", "model", "--shape", "tiny", *QUICK, "--plot", str(tmp_path / "speed.png"))
    assert code == 0, err
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "or --shape"),
        (("DIR", "--group-size", "64"), "--group-size belongs to --shape"),
        (("--shape", "tiny", "--group-size", "0"), "--group-size 0"),
        (("--shape", "tiny", "--batch", "x"), "--batch x"),
        (("--shape", "tiny", "--kv-cache-dtype", "auto,fp8"), "auto,fp8"),
        (("--shape", "tiny", "--kv-cache-dtype", "int8", "--device", "cpu"), "of a GPU"),
        (("--shape", "tiny", "--head", "packed,fp8"), "packed,fp8"),
        (("--shape", "tiny", "--head", "packed", "--device", "cpu"), "for a GPU"),
    ],
)
def test_contradictions_are_named(trirun, options, message):
    code, _, err = trirun("bench", "model", *options)
    assert code == 2 and message in " ".join(err.split())


def test_a_context_that_the_model_does_not_have(trirun, packed):
    code, out, err = trirun("bench", "model", packed, "--device", "cpu", "--context", "64,128")
    assert code == 2 and not out and "--context 128: " in err and "attends to 128 positions at once" in err


def test_the_usual_context_leaves_room_for_a_token(trirun, packed):
    code, out, err = trirun("bench", "model", packed, "--device", "cpu", "--batch", "1", "--seconds", "0.01", "--json")
    assert code == 0, err
    assert [cell["context"] for cell in json.loads(out)["results"]] == [127]
