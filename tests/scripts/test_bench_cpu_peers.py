"""The side-by-side benchmark's own parts: its synthetic model is valid and its readers understand what they read."""

import importlib
import json
import sys

import pytest

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def scripts(repo_root, monkeypatch):
    """peer_models, shrunk, and bench_cpu_peers."""
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    peer_models = importlib.import_module("peer_models")
    monkeypatch.setitem(sys.modules, "peer_models", peer_models)
    monkeypatch.setattr(peer_models, "SHAPE", peer_models.SHAPE | SMALL)
    return peer_models, importlib.import_module("bench_cpu_peers")


def test_the_worker_runs_the_synthetic_model(scripts, tmp_path, capsys):
    peer_models, bench = scripts
    peer_models.write_trirun(tmp_path / "model", 2)
    bench.worker([str(tmp_path / "model"), "2", "8", "12", "5"])
    prefill, decode = bench.read_worker(capsys.readouterr().out)
    assert prefill > 0 and decode > 0
    packed, scales = 14 * 128 * 128 // 4, 14 * 128 * 2
    bench.worker(["bytes", str(tmp_path / "model")])
    assert int(capsys.readouterr().out) == packed + scales + 96 * 128


def test_the_same_seed_gives_the_same_ternary_weight(scripts):
    peer_models, _ = scripts
    codes, scales = peer_models.ternary(3, 64, 128)
    again, _ = peer_models.ternary(3, 64, 128)
    assert (codes == again).all() and sorted({*codes.flatten()}) == [-1, 0, 1]
    assert scales.shape == (64, 1) and len({*scales.flatten()}) > 30
    assert len(list(peer_models.linears(2))) == 14


def test_llama_bench_is_understood(scripts):
    _, bench = scripts
    answer = [{"n_prompt": 128, "n_gen": 0, "avg_ts": 80.5}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 22.25}]
    assert bench.read_llama_bench(json.dumps(answer)) == (80.5, 22.25)


def test_a_failed_run_ends_the_benchmark(scripts):
    _, bench = scripts
    text, peak = bench.run_process([sys.executable, "-c", "print(7)"])
    assert text.strip() == "7" and peak > 1
    with pytest.raises(SystemExit, match=r"ended with 3:\nno such model"):
        bench.run_process([sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"])
