"""trirun bench f16acc on the reference: the two tables, the JSON document, the plots, wrong products."""

import json
from importlib.util import find_spec

import pytest

from trirun_cli.bench import f16acc as f16acc_bench
from trirun_cli.errors import CheckFailed


@pytest.fixture(autouse=True)
def small_picture(monkeypatch, small_cache):
    monkeypatch.setattr(f16acc_bench, "PICTURE_N", 64)
    monkeypatch.setattr(f16acc_bench, "PICTURE_K", 2048)


QUICK = ("bench", "f16acc", "--sizes", "32,64", "--splits", "1,8", "--seconds", "0.001", "--device", "cpu", "-q")


def test_tables_have_every_cell_and_its_unit(trirun):
    code, out, _ = trirun(*QUICK)
    assert code == 0
    for text in ("TFLOP/s", "µs", "32³", "64³", "default", "splits = 8", "gpu_poor RMS", "0.0522"):
        assert text in out


def test_json_document(trirun):
    code, out, _ = trirun(*QUICK, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.bench.f16acc/1"
    assert {(s["size"], s["contestant"]) for s in document["speeds"]} == {
        (size, name) for size in (32, 64) for name in ("trirun", "torch")
    }
    for speed in document["speeds"]:
        assert speed["tflops"] == pytest.approx(2 * speed["size"] ** 3 / speed["us"] * 1e-6)
    by_splits = {e["splits"]: e for e in document["errors"] if e["contestant"] == "trirun"}
    assert {splits: e["chunk"] for splits, e in by_splits.items()} == {0: 192, 1: 2048, 8: 256}
    assert by_splits[0]["rms"] < by_splits[1]["rms"]
    for e in document["errors"]:
        assert e["low"] <= e["quarter"] <= e["median"] <= e["three_quarters"] <= e["largest"]


def test_a_cpu_is_not_timed_unless_asked(trirun):
    code, out, _ = trirun("bench", "f16acc", "--splits", "1", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["speeds"] == []


@pytest.mark.parametrize("arguments", [("--sizes", "0"), ("--splits", "two"), ("--seconds", "0"), ("--device", "tpu")])
def test_bad_options_are_refused(trirun, arguments):
    code, out, err = trirun("bench", "f16acc", *arguments)
    assert code == 2 and arguments[0] in err and not out


def test_nothing_is_timed_while_the_check_is_red(monkeypatch):
    import torch

    right = f16acc_bench.f16acc_gemm
    monkeypatch.setattr(f16acc_bench, "f16acc_gemm", lambda a, b, **options: right(a, b, **options) * 1.01)
    monkeypatch.setattr(f16acc_bench, "interleaved", lambda *_: pytest.fail("timed a wrong product"))
    with pytest.raises(CheckFailed, match="m=64 n=64 k=64"):
        list(f16acc_bench.speeds([64], torch.device("cpu"), 0.001))


def test_plot(trirun, tmp_path):
    path = tmp_path / "f16acc.png"
    code, _, err = trirun(*QUICK, "--plot", path)
    if find_spec("matplotlib") is None:
        assert code == 4 and "trirun[plot]" in err and not path.exists()
    else:
        assert code == 0 and path.read_bytes().startswith(b"\x89PNG")
