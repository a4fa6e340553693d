"""The side-by-side benchmark's own parts: its models are whole, and its readers understand what they read."""

import contextlib
import importlib
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.models.description import description
from trirun_cli.models.linears import described_layers

SCRIPTS = ("bench_cpu_peers", "peer_families", "peer_models", "peer_workers", "synthetic_packed")
# What a config.json of a family does not hold, and transformers' class needs: padding within the small vocabulary.
NEEDED = {"pad_token_id": 0}


@pytest.fixture
def scripts(repo_root, monkeypatch):
    """The benchmark's modules."""
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in SCRIPTS})


@pytest.fixture
def small(scripts):
    """A Llama that is made in no time."""
    return scripts.peer_families.configs("llama")["tiny"] | {"num_hidden_layers": 2, "hidden_size": 128,
                                                             "intermediate_size": 128, "vocab_size": 8192}  # fmt: skip


def test_models_have_the_sizes_that_they_should(scripts):
    """1 to 2 B parameters but for the vocabulary, and rows of whole blocks of TQ2_0; llama.cpp has every family."""
    from trirun_cli.checkpoint.formats.gguf.targets import TARGETS

    for family in scripts.peer_families.FAMILIES:
        tiny, large = scripts.peer_families.configs(family).values()
        for config in (tiny, large):
            assert config["model_type"] in TARGETS
            found = description(config)
            layers = described_layers(found)
            gates = {module for layer in found.shape.layers for module in found.names.of(layer).gates}
            gates |= {"shared_expert_gate", "router.proj"}
            packed = {name: size for name, size in layers.items() if not name.endswith(tuple(gates))}
            assert all(k % 256 == 0 and n % 64 == 0 for n, k in packed.values()), family
        weights = sum(n * k for n, k in described_layers(description(large)).values())
        assert 0.8e9 < weights < 2e9, family


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gemma4_e", "gemma4_moe", "gpt_oss", "phi3", "starcoder2", "qwen3_next"]
)
def test_a_synthetic_model_has_the_tensors_of_a_real_one(scripts, tmp_path, family):
    config = scripts.peer_families.configs(family)["tiny"] | {"vocab_size": 128}
    config.setdefault("tie_word_embeddings", False)
    scripts.synthetic_packed.write(tmp_path / "made", config)
    made = Checkpoint(tmp_path / "made")
    import torch

    from trirun_cli.workflows.pack import pack

    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | NEEDED))
    with torch.no_grad():
        kept = {id(real.get_input_embeddings().weight), id(real.get_output_embeddings().weight)}
        for parameter in real.parameters():
            if parameter.dim() >= 2 and id(parameter) not in kept:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 0.125)
    real.save_pretrained(tmp_path / "real")
    pack(tmp_path / "real", tmp_path / "packed")
    packed = Checkpoint(tmp_path / "packed")

    def plain(names):
        # Gates of one or a few rows, and what is no layer's, are packed there, and floats here.
        parts = ("gate", "in_proj_b", "in_proj_a", "router", "per_layer_model_projection")
        return {name for name in names if not (name.endswith(".weight_scale") and any(part in name for part in parts))}

    assert plain(made.names) == plain(packed.names)
    assert {made.shape(module) == packed.shape(module) for module in made.modules} == {True}


def test_the_worker_runs_the_synthetic_model(scripts, small, tmp_path, capsys):
    scripts.peer_models.write_trirun(tmp_path / "model", small)
    scripts.peer_workers.decode(str(tmp_path / "model"), "2", "8", "12", "5")
    prefill, decode = scripts.bench_cpu_peers.read_worker(capsys.readouterr().out)
    assert prefill > 0 and decode > 0
    scripts.peer_workers.token_bytes(str(tmp_path / "model"))
    sizes = described_layers(description(small)).values()
    expected = sum(n * k // 4 + 2 * n for n, k in sizes) + 8192 * 128
    assert int(capsys.readouterr().out) == expected


def test_files_of_both_hold_the_same_values(scripts, small, tmp_path, capsys):
    """The comparison finds the decoder's own logits equal, and others not."""
    from trirun_cli.backends.cpu.decoder import NativeDecoder
    from trirun_cli.checkpoint.formats.gguf.file import GgufFile

    (tmp_path / "model").mkdir()
    scripts.peer_models.write_trirun(tmp_path / "model" / "trirun", small)
    exact = scripts.peer_models.exact_file(tmp_path / "model")
    assert exact == scripts.peer_models.exact_file(tmp_path / "model")
    assert {tensor.type.name for tensor in GgufFile(exact).tensors.values()} == {"F16", "F32"}
    scripts.peer_workers.token_bytes(str(exact))
    assert int(capsys.readouterr().out) > 2 * 8192 * 128
    tokens = [3, 5, 8, 13]
    decoder = NativeDecoder(tmp_path / "model" / "trirun", threads=1, act_bits=16, int8_head=False)
    logits = decoder.forward(tokens, keep=4)
    first = int(logits[-1].argmax())
    second = int(decoder.forward([first], position=4)[0].argmax())
    np.save(tmp_path / "logits.npy", logits)
    prompt, greedy = ",".join(map(str, tokens)), json.dumps([first, second, -1])
    scripts.peer_workers.compare(str(tmp_path / "model" / "trirun"), str(tmp_path / "logits.npy"), prompt, greedy)
    assert json.loads(capsys.readouterr().out) == {"difference": 0.0, "same": 2, "greedy": 3}
    np.save(tmp_path / "logits.npy", 1.5 * logits)
    scripts.peer_workers.compare(str(tmp_path / "model" / "trirun"), str(tmp_path / "logits.npy"), prompt, "[]")
    assert json.loads(capsys.readouterr().out)["difference"] == pytest.approx(0.5)


def test_llama_bench_is_understood(scripts):
    answer = [{"n_prompt": 128, "n_gen": 0, "avg_ts": 80.5}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 22.25}]
    assert scripts.bench_cpu_peers.read_llama_bench(json.dumps(answer)) == (80.5, 22.25)
    prefill, decode = scripts.bench_cpu_peers.read_llama_bench(json.dumps(answer[1:]))
    assert np.isnan(prefill) and decode == 22.25


def test_a_failed_run_ends_the_benchmark(scripts):
    bench = scripts.bench_cpu_peers
    text, peak = bench.run_process([sys.executable, "-c", "print(7)"])
    assert text.strip() == "7" and peak > 1
    with pytest.raises(SystemExit, match=r"ended with 3:\nno such model"):
        bench.run_process([sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"])


def test_the_table_of_families(scripts, tmp_path, monkeypatch, capsys):
    """Both models of a family, every engine in turn, ratios round by round."""
    bench, answers = scripts.bench_cpu_peers, iter([20.0, 10.0, 30.0, 10.0] * 2)
    for name in ("gemma2", "gemma2-tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "TQ2_0.gguf").touch()
    asked = []

    def run(command):
        asked.append(command)
        value = next(answers)
        of_llama_cpp = command[0].endswith("llama-bench")
        made = [{"n_prompt": 0, "avg_ts": value, "n_gen": 1}]
        return json.dumps(made if of_llama_cpp else [float("nan"), value]), 1.0

    monkeypatch.setattr(bench, "run_process", run)
    command = ["bench", str(tmp_path), "--models", str(tmp_path), "--families", "gemma2", "--act-bits", "16"]
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "2", "--json", str(tmp_path / "out.json")])
    assert bench.main() == 0
    table = capsys.readouterr().out
    assert "| gemma2 | tiny | 25 | 10 | 2.50 |" in table and "Gemma-2-2B, 16 of 26 layers | 25 | 10 | 2.50 |" in table
    assert asked[0][-1] == "384" and asked[1][-6:-4] == ["-n", "384"]
    assert json.loads((tmp_path / "out.json").read_text())["gemma2, tiny"]["llama.cpp TQ2_0"] == [10.0, 10.0]
    monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), "--families", "rwkv"])
    with pytest.raises(SystemExit):
        bench.main()


def test_ahead_of_others_both_are(scripts, tmp_path):
    (tmp_path / "src" / "llama_cpp_python-0.3.36").mkdir(parents=True)
    arguments = SimpleNamespace(threads=1, fifo=True, act_bits="8", types="TQ2_0")
    ours, theirs = scripts.bench_cpu_peers.make_rows(arguments, tmp_path, tmp_path / "m", [tmp_path / "f.gguf"], 0)
    assert ours.command[-3:] == ["0", "{}", "fifo"] and theirs.command[-4:] == ["--threads", "1", "--decode", "{}"]
    assert theirs.command[1] == f"LLAMA_CPP_LIB_PATH={tmp_path}/llama.cpp/bin" and theirs.read is ours.read


def test_other_programs_come_again_after_a_measurement(scripts, monkeypatch):
    asked = []
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda thread, policy, how: asked.append((policy, how.sched_priority))
    )
    with contextlib.suppress(KeyError), scripts.peer_workers.ahead_of_others(True):
        raise KeyError
    assert {(os.SCHED_FIFO, 1), (os.SCHED_OTHER, 0)} == set(asked) and asked[-1] == (os.SCHED_OTHER, 0)
