"""``trirun eval``: perplexity against an independent computation, and bounds that fail."""

import hashlib
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The sea was calm, and the ship lay still. Nobody spoke for a long time. " * 40


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def independent_perplexity(path, window):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt")["input_ids"][0]
    total, count = 0.0, 0
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window].unsqueeze(0)
        with torch.inference_mode():
            total += model(part, labels=part).loss.item() * (window - 1)
        count += window - 1
    return math.exp(total / count), count


def test_both_models_against_an_independent_computation(trirun, packed, ternary_model, text):
    arguments = ("-c", packed, "-m", ternary_model, "--text", text, "--window", "64", "--json")
    code, out, _ = trirun("eval", *arguments)
    model, checkpoint = json.loads(out)["results"]
    want, tokens = independent_perplexity(ternary_model, 64)
    assert code == 0 and model["tokens"] == checkpoint["tokens"] == tokens
    assert model["perplexity"] == pytest.approx(want, rel=1e-5)
    assert checkpoint["perplexity"] == pytest.approx(want, rel=1e-3)
    assert checkpoint["ratio"] == pytest.approx(1, rel=1e-3)


def test_a_bound_that_does_not_hold_fails(trirun, packed, ternary_model, text):
    arguments = ("eval", "-c", packed, "-m", ternary_model, "--text", text, "--window", "64", "--limit", "2")
    assert trirun(*arguments, "--max-ratio", "1.01")[0] == 0
    code, out, err = trirun(*arguments, "--max-ratio", "0.5")
    assert code == 6 and "above --max-ratio 0.5" in err and "perplexity" in out


def test_the_context_that_a_window_slides_in(trirun, packed, copy_of, text):
    model = copy_of(packed)
    config = json.loads((model / "config.json").read_text())
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    (model / "config.json").write_text(json.dumps(config | window))
    base = ("eval", model, "--text", text, "--limit", 2, "--json")
    # Past its window as it was trained, and within it; neither where --window is the longer.
    for options, engine, tokens in [(("--window", 64), "native decoder", 64), (("--ctx", 32), "native decoder", 32)]:
        code, out, _ = trirun(*base, *options)
        (found,), (result,) = json.loads(out)["models"].values(), json.loads(out)["results"]
        assert code == 0 and found["engine"].startswith(engine) and result["window"] == tokens
    code, _, err = trirun(*base, "--ctx", 32, "--window", 64)
    assert code == 2 and err == "error: --window 64: more than --ctx 32\n"
    code, _, err = trirun(*base, "--ctx", 4096)
    assert code == 2 and "--ctx 4096: the context of" in err


def test_texts_that_cannot_be_used(trirun, packed, text, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.txt").write_text("Too short.")
    for arguments, wanted, message in [
        (("--text", tmp_path / "nowhere.txt"), 3, "No such file"),
        (("--text", tmp_path / "binary"), 3, "is not UTF-8"),
        (("--text", tmp_path / "short.txt"), 3, "less than one window"),
        (("--text", text, "--window", "4096"), 2, "4096 tokens does not fit the context of 128 (--ctx)"),
        (("--text", text, "--window", "200"), 2, "200 tokens does not fit the context of 128 (--ctx)"),
    ]:
        code, _, err = trirun("eval", "-c", packed, *arguments)
        assert code == wanted and message in err


def test_one_window_has_no_standard_error_and_the_digest_is_the_files(trirun, packed, tmp_path):
    content = TEXT.replace(". ", ".\r\n").encode()
    (tmp_path / "text.txt").write_bytes(content)
    arguments = ("eval", "-c", packed, "--text", tmp_path / "text.txt", "--window", "64", "--limit", "1")
    code, out, _ = trirun(*arguments, "--json")
    document = json.loads(out)
    (found,) = document["results"]
    assert code == 0 and found["perplexity"] > 1
    assert found["nll_stderr"] is None and found["perplexity_stderr"] is None
    assert document["data"]["perplexity"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert "│ –" in " ".join(trirun(*arguments)[1].split())


@pytest.mark.parametrize(("option", "place"), [("--markdown", "taken"), ("--log-samples", "text.txt")])
def test_a_place_where_nothing_can_be_written_is_refused_first(trirun, packed, text, tmp_path, option, place):
    (tmp_path / "taken").mkdir()
    arguments = ("--text", text, "--window", "64", "--limit", "1", option, tmp_path / place)
    code, out, err = trirun("eval", "-c", packed, *arguments)
    assert code == 3 and f"error: {option} {tmp_path / place}: " in err and out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken", "text.txt"]


def test_a_report_that_cannot_be_written_leaves_nothing_of_itself_and_the_samples(
    trirun, packed, text, tmp_path, monkeypatch
):
    (tmp_path / "taken").mkdir()
    monkeypatch.setattr("trirun_cli.commands.eval.check_output", lambda *_, **__: None)
    arguments = ("--text", text, "--window", "64", "--limit", "1", "--markdown", tmp_path / "taken")
    code, out, err = trirun("eval", "-c", packed, *arguments, "--log-samples", tmp_path / "samples")
    assert code == 3 and "taken: Is a directory" in err and "perplexity" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples", "taken", "text.txt"]
    assert (tmp_path / "samples" / "checkpoint" / "perplexity.jsonl").is_file()
