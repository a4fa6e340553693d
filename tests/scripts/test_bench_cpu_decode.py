"""The benchmark of decoding against its bound: every contestant runs, and disagreement is found."""

import importlib
import json
import sys

import pytest


@pytest.fixture
def bench(repo_root, monkeypatch, tmp_path):
    """bench_cpu_decode, and a small random model in tmp_path / "model"."""
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    peer_models, peer_families = map(importlib.import_module, ("peer_models", "peer_families"))
    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"head_dim": 64, "vocab_size": 8192, "num_hidden_layers": 2}
    peer_models.write_trirun(tmp_path / "model", peer_families.DEFAULT | small)
    return importlib.import_module("bench_cpu_decode")


def test_a_row_for_every_contestant(bench, monkeypatch, tmp_path, capsys):
    options = ["--rounds", "2", "--tokens", "6", "--threads", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_cpu_decode.py", str(tmp_path / "model"), *options])
    bench.main()
    document = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in document["rows"]]
    assert names[:3] == [bench.BOUND, bench.STRICT, bench.DECODER] and len(names) == 3 + len(bench.SAMPLING)
    assert document["rows"][0]["to_bound"] == [1, 1, 1]
    assert all(row["us_per_token"] > 0 and row["to_strict"][1] > 0 for row in document["rows"])


def test_another_text_is_an_error(bench, monkeypatch, tmp_path):
    made = bench.Bench(tmp_path / "model", 6, None, 1)
    greedy = made._greedy

    def wrong():
        seconds = greedy()
        made.texts[bench.DECODER] = (*made.texts[bench.DECODER][:-1], -1)
        return seconds

    monkeypatch.setattr(made, "_greedy", wrong)
    with pytest.raises(AssertionError, match="disagree"):
        bench.measure(made, 1)
