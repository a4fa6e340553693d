"""The numbers of ``trirun eval`` against independent computations."""

import json
import math
import random
from statistics import fmean, stdev

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trirun_cli.eval import standard_errors
from trirun_cli.eval.comparison import compare, perplexity_ratio
from trirun_cli.eval.corpus import file_rows, join_rows
from trirun_cli.eval.divergence import kl_divergence
from trirun_cli.eval.perplexity import perplexity_of

TEXT = "The sea was calm, and the ship lay still. Nobody spoke for a long time. " * 40


def test_standard_errors_are_those_of_the_textbook():
    draw = random.Random(1)
    values = [float(draw.random() < 0.3) for _ in range(400)]
    p = fmean(values)
    assert standard_errors.stderr_of_mean(values) == pytest.approx(math.sqrt(p * (1 - p) / 399))
    assert standard_errors.influence(values, p) == values
    assert standard_errors.stderr_of_mean([1.0]) is None and standard_errors.influence(["a"], 1.0) is None
    # exp(-mean): the delta method agrees with resampling.
    losses = [-draw.gauss(2, 0.5) for _ in range(400)]
    score = math.exp(-fmean(losses))
    delta = standard_errors.stderr_of_mean(standard_errors.influence(losses, score))
    resampled = standard_errors.bootstrap_stderr(losses, lambda drawn: math.exp(-fmean(drawn)), seed=3)
    assert delta == pytest.approx(score * stdev(losses) / 20) and resampled == pytest.approx(delta, rel=0.15)
    assert standard_errors.influence(losses, score * 1.01) is None


def test_pooled_errors_are_those_of_lm_eval():
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="lm-eval is not installed")
    draw = random.Random(2)
    strata = [[float(draw.random() < rate) for _ in range(size)] for rate, size in ((0.2, 40), (0.5, 90), (0.7, 15))]
    errors, sizes = [metrics.mean_stderr(values) for values in strata], [len(values) for values in strata]
    every = [value for values in strata for value in values]
    assert standard_errors.group_stderr(strata, fmean(every)) == pytest.approx(
        metrics.pooled_sample_stderr(errors, sizes)
    )
    unweighted = fmean(map(fmean, strata))
    assert standard_errors.group_stderr(strata, unweighted) == pytest.approx(metrics.unweighted_mean_stderr(errors))
    assert standard_errors.group_stderr(strata, 0.123) is None and standard_errors.pooled_stderr([[1.0], [0.0]]) is None


def test_a_paired_error_is_smaller_than_two_separate_ones_and_answers_are_compared():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from trirun_cli.eval.tasks.scores import Sample, TaskScore

    def score(answers):
        samples = [
            Sample(i, "q", ["a", "b"], [-1.0, -1.5] if pick == 0 else [-2.0, -1.0], pick, 0, {"acc": float(pick == 0)})
            for i, pick in enumerate(answers)
        ]
        value = fmean(sample.values["acc"] for sample in samples)
        error = standard_errors.stderr_of_mean([sample.values["acc"] for sample in samples])
        return TaskScore("t", "1", 0, len(samples), len(samples), [], {"acc": value}, {"acc": error}, {}, samples)

    model, checkpoint = score([0, 1] * 50), score([0, 1] * 49 + [1, 0])
    (found,) = compare([model], [checkpoint])
    gaps = [0.0] * 98 + [-1.0, 1.0]
    assert found.value == 0 and found.stderr == pytest.approx(stdev(gaps) / 10)
    assert found.stderr < math.hypot(model.stderrs["acc"], checkpoint.stderrs["acc"]) / 4
    # Of the two questions apart, the model preferred its answer by 0.5 in one and by 1.0 in the other.
    assert (found.questions, found.same_answers, found.largest_margin) == (100, 98, 1.0)


def test_the_ratio_of_perplexities_has_a_paired_error():
    losses = [3.0, 3.5, 2.5, 4.0]
    model, checkpoint = perplexity_of(losses, 8), perplexity_of([loss + 0.1 for loss in losses], 8)
    ratio, stderr = perplexity_ratio(model, checkpoint)
    assert ratio == pytest.approx(math.exp(0.1)) and stderr == pytest.approx(0, abs=1e-12)
    assert model.value == pytest.approx(math.exp(3.25)) and model.stderr == pytest.approx(stdev(losses) / 2)


def test_divergence_is_that_of_torch():
    torch.manual_seed(0)
    a, b = torch.randn(7, 50) * 3, torch.randn(7, 50) * 3
    wanted = torch.nn.functional.kl_div(
        b.double().log_softmax(-1), a.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert torch.allclose(kl_divergence(a, b), wanted) and kl_divergence(a, a).abs().max() == 0


def test_kl_of_two_models_against_a_direct_computation(trirun, ternary_model, plain_model, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = (
        "-m",
        ternary_model,
        "-c",
        plain_model,
        "--text",
        tmp_path / "text.txt",
        "--window",
        "32",
        "--limit",
        "3",
    )
    code, out, _ = trirun("eval", *arguments, "--tasks", "kl", "--json", "--resume", tmp_path / "cache")
    (found,) = json.loads(out)["results"]
    ids = AutoTokenizer.from_pretrained(plain_model)(TEXT, return_tensors="pt")["input_ids"][0, :96].view(3, 32)
    logits = []
    for path in (ternary_model, plain_model):
        with torch.inference_mode():
            logits.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits[:, :-1].double())
    p, q = (side.log_softmax(-1) for side in logits)
    values = (p.exp() * (p - q)).sum(-1).flatten()
    assert code == 0 and found["tokens"] == 93 and found["windows"] == 3
    assert found["kl"] == pytest.approx(values.mean().item(), rel=1e-3) and found["kl"] > 0
    assert found["maximum"] == pytest.approx(values.max().item(), rel=1e-3)
    assert found["percentiles"]["90"] == pytest.approx(values.quantile(0.9).item(), rel=1e-2)
    assert found["same_top"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    again = json.loads(trirun("eval", *arguments, "--tasks", "kl", "--json", "--resume", tmp_path / "cache")[1])
    assert again["results"] == [found]


def test_rows_of_the_file_become_rows_of_the_hub():
    file = " \n = Title = \n \n Some words . \n"
    assert file_rows(file) == ["", " = Title = \n", "", " Some words . \n"]
    assert join_rows(file_rows(file)) == "\n\n = Title = \n\n\n\n\n Some words . \n"


def test_wikitext2_by_twenty_lines(trirun, shared):
    """GPTQ's protocol, written out, on the first windows of the reference model."""
    model, data = shared / "models/bookshelf-8m", shared / "data/wikitext2"
    windows = ("--window", "256", "--limit", "3")
    code, out, err = trirun("eval", "-m", model, "--tasks", "wikitext2", "--data-dir", data, *windows, "--json")
    (found,) = json.loads(out)["results"]
    with (data / "wiki.test.raw").open(encoding="utf-8") as file:
        lines = list(file)
    text = "\n\n".join("" if line.isspace() else line for line in lines)
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt", verbose=False)["input_ids"]
    runner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for start in range(0, 3 * 256, 256):
        part = ids[:, start : start + 256]
        with torch.inference_mode():
            losses.append(runner(part, labels=part).loss.item())
    assert code == 0 and found["window"] == 256 and "not the official" not in err
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_another_text_by_the_name_of_the_test_split_is_noticed(trirun, plain_model, tmp_path):
    (tmp_path / "wiki.test.raw").write_text(TEXT.replace(". ", ".\n \n"))
    arguments = ("-m", plain_model, "--tasks", "wikitext2", "--data-dir", tmp_path / "wiki.test.raw", "--window", "64")
    code, out, err = trirun("eval", *arguments)
    assert code == 0 and "is not the official raw test split" in err and "wikitext2 of wiki.test.raw" in out
