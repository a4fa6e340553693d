"""trirun bench: shapes, checks before timings, the table, the JSON document and the plot."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trirun_kernels.weights.packing import unpack
from trirun_kernels.weights.spec import QuantSpec

from trirun_cli.bench import f16acc as f16acc_bench
from trirun_cli.bench import kernels as kernel_bench
from trirun_cli.bench import timing
from trirun_cli.bench.shapes import load_shapes, parse_shapes
from trirun_cli.bench.timing import cache_bytes, copies, from_memory, interleaved
from trirun_cli.commands.bench.measuring import busy, check_measuring, positive_numbers
from trirun_cli.commands.shared.options import check_output
from trirun_cli.errors import CheckFailed, InputError, UsageError
from trirun_cli.models.synthetic import random_ternary

pytestmark = pytest.mark.usefixtures("small_cache")
CPU = torch.device("cpu")
QUICK = ("--shapes", "128x256,70x200", "--seconds", "0.001", "--device", "cpu", "-q")


@pytest.fixture
def some_machine(monkeypatch):
    """Limits that need not be measured."""
    machine = kernel_bench.Machine("cpu", "some processor", torch.__version__, 1.0, 1.0)
    monkeypatch.setattr(kernel_bench, "measure_machine", lambda _: machine)


def test_every_listed_shape_can_be_grouped():
    for name, shapes in load_shapes().items():
        assert shapes, name
        assert all(shape.n % 64 == 0 and shape.k % 128 == 0 for shape in shapes), name


def test_shapes_mix_lists_and_sizes_without_repeats():
    chosen = parse_shapes("llama-2-7b,4096x4096,64x128", "cpu")
    assert [(s.n, s.k) for s in chosen] == [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008), (64, 128)]
    assert parse_shapes(None, "cpu") == load_shapes()["cpu"]


@pytest.mark.parametrize("word", ["llama-9", "64x", "0x128", ""])
def test_unknown_shapes_are_named(word):
    with pytest.raises(UsageError, match="neither NxK nor one of default"):
        parse_shapes(f"64x128,{word}", "cpu")
    with pytest.raises(UsageError, match="neither NxK nor one of default"):
        parse_shapes(word, "cpu")


@pytest.mark.parametrize("word", ["0", "-1", "two", "", "²", "1_0", "9" * 10])
def test_lists_of_numbers_name_the_word_that_is_none(word):
    assert positive_numbers("--m", "16,1, 4,1,007") == [1, 4, 7, 16]
    with pytest.raises(UsageError, match=f"--m {word}: not a positive number"):
        positive_numbers("--m", f"1,{word}")


@pytest.mark.parametrize("command", ["kernels", "model", "f16acc"])
def test_a_picture_that_cannot_be_drawn_is_refused_first(trirun, command):
    options = ("--shape", "tiny") if command == "model" else ()
    code, out, err = trirun("bench", command, *options, "--device", "cpu", "--plot", "speed.jpeg2")
    assert code == 2 and out == "" and "--plot speed.jpeg2: a name that ends in" in err


@pytest.mark.parametrize("command", ["kernels", "model", "f16acc"])
def test_a_picture_that_cannot_be_written_is_refused_first(trirun, tmp_path, command):
    options = ("--shape", "tiny") if command == "model" else ()
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for name, reason in (("file/a/b.png", "Not a directory"), ("folder.png", "Is a directory")):
        path = tmp_path / name
        code, out, err = trirun("bench", command, *options, "--device", "cpu", "--plot", path)
        assert code == 3 and out == "" and f"--plot {path}: {reason}" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize("place", ["/proc/x", "/proc/a/x"])
def test_a_place_is_tried_before_the_work_and_left_as_it_was(tmp_path, place):
    for folder in (False, True):
        with pytest.raises(InputError, match=f"--out {place}: "):
            check_output("--out", Path(place), folder=folder)
        check_output("--out", tmp_path / "new" / "folder" / "x", folder=folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_measuring_has_a_length(seconds):
    with pytest.raises(UsageError, match="--seconds"):
        check_measuring(seconds)


def test_table_has_units_and_every_cell(trirun):
    code, out, _ = trirun("bench", "kernels", *QUICK, "--m", "1,3")
    assert code == 0
    assert "GB/s" in out and "TFLOP/s" in out and "µs" in out
    assert out.count("128 × 256") == 2 and out.count("70 × 200") == 2


def test_the_smallest_shapes(trirun, some_machine):
    code, out, err = trirun("bench", "kernels", "--shapes", "1x1,2x1", "--m", "1", *QUICK[2:], "--json")
    assert code == 0, err
    assert [(r["n"], r["k"]) for r in json.loads(out)["results"]] == [(1, 1), (2, 1)]


def test_ctrl_c_keeps_what_has_been_measured(trirun, monkeypatch):
    timed, asked = kernel_bench._time, []

    def time_two(*arguments):
        asked.append(arguments)
        if len(asked) > 2:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(kernel_bench, "_time", time_two)
    code, out, err = trirun("bench", "kernels", *QUICK, "--m", "1,3", "--json")
    document = json.loads(out)
    assert code == 130 and not document["complete"] and "stopped after 2 of 4 measurements" in err
    assert [(r["n"], r["m"]) for r in document["results"]] == [(128, 1), (128, 3)]
    code, out, _ = trirun("bench", "kernels", *QUICK, "--m", "1,3", "--json")
    assert code == 130 and out == "", "nothing was ready"


def test_json_document(trirun):
    code, out, _ = trirun("bench", "kernels", *QUICK, "--m", "2", "--act-bits", "8", "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "trirun.bench.kernels/2" and document["complete"]
    assert document["machine"]["read_gbps"] > 0 and document["machine"]["matmul_tflops"] > 0
    assert [(r["n"], r["k"], r["m"]) for r in document["results"]] == [(128, 256, 2), (70, 200, 2)]
    for result in document["results"]:
        assert result["accumulate"] == "fp32"
        assert result["relative_error"] <= result["allowed_error"]
        assert result["us"] > 0 and result["floor_us"] > 0 and "peak_share" not in result
        rate = 2e-6 * result["n"] * result["k"] * result["m"] / result["us"]
        assert result["matmul_ratio"] == pytest.approx(rate / document["machine"]["matmul_tflops"])
        assert result["speedup_torch"] == pytest.approx(min(result["peers_us"].values()) / result["us"])


@pytest.mark.parametrize(
    "arguments",
    [("--group-size", "48"), ("--act-bits", "4"), ("--dtype", "int8"), ("--group-size", "128"), ("--device", "tpu")],
)
def test_bad_options_are_refused(trirun, arguments):
    code, out, err = trirun("bench", "kernels", *QUICK, "--m", "1", *arguments)
    assert code == 2 and arguments[0] in err and not out


def test_fp16_sums_are_named(trirun, some_machine):
    options = ("bench", "kernels", "--shapes", "64x128", "--m", "1", "--seconds", "0.001", "-q", "--dtype", "float16")
    code, out, _ = trirun(*options, "--device", "cpu", "--accumulate", "fp16")
    assert code == 0 and "float16, sums in fp16; medians" in out
    code, out, _ = trirun(*options, "--device", "cpu", "--accumulate", "fp16", "--json")
    assert code == 0 and json.loads(out)["results"][0]["accumulate"] == "fp16"


def test_nothing_is_timed_while_the_check_is_red(monkeypatch):
    from trirun_kernels.gemm import ops

    right = ops.int2_gemm
    monkeypatch.setattr(ops, "int2_gemm", lambda x, w, **options: right(x, w, **options) * 1.01)
    monkeypatch.setattr(kernel_bench, "interleaved", lambda *_: pytest.fail("timed a wrong product"))
    machine = kernel_bench.Machine("cpu", "", "", 1.0, 1.0)
    with pytest.raises(CheckFailed, match="64x128 m=2"):
        list(
            kernel_bench.run(
                parse_shapes("64x128", "cpu"), [2], device=CPU, dtype=torch.float32, group_size=-1, act_bits=16,
                machine=machine, seconds=0.001,
            )
        )  # fmt: skip


def test_an_output_that_is_not_finite_is_an_error(monkeypatch):
    from trirun_kernels.gemm import ops

    monkeypatch.setattr(ops, "int2_gemm", lambda x, w, **_: torch.full((x.shape[0], w.n), float("nan")))
    w = random_ternary(64, 128, QuantSpec(-1, 1.0), torch.Generator())
    error, allowed = kernel_bench.checked_error(torch.ones(1, 128), w, 16)
    assert error > allowed


def test_random_weights_are_ternary():
    w = random_ternary(130, 300, QuantSpec(-1, 1.0), torch.Generator())
    codes, scales, _ = unpack(w)
    assert codes.shape == (130, 300) and codes.unique().tolist() == [0, 1, 2]
    assert scales.min() > 0


def test_every_weight_copy_is_called_every_round():
    seen = []
    timings = interleaved({"a": [lambda: seen.append(0), lambda: seen.append(1)], "b": [lambda: None]}, CPU, 0.001)
    assert timings["a"].rounds == timings["b"].rounds >= 5
    assert seen.count(1) == timings["a"].rounds and timings["a"].median > 0


def test_caches_count_from_32_to_128_mib():
    assert 32 << 20 <= cache_bytes(CPU) <= 128 << 20


def test_copies_outlast_the_cache(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 128 << 20)
    assert copies(1 << 30, CPU) == 2
    assert copies(1, CPU) == 4096
    # A layer of TriLM 99M: 64 copies of it would stay in a cache of 32 MiB, and be read faster than memory is; of the
    # largest caches that count, 128 MiB, 2048 would leave half.
    assert from_memory(copies(512 * 512 // 4, CPU) * 512 * 512 // 4, CPU) and not from_memory(64 * 512 * 512 // 4, CPU)


def test_plot(trirun, tmp_path):
    path = tmp_path / "new" / "bench.png"
    code, _, err = trirun("bench", "kernels", *QUICK, "--m", "1,2", "--plot", path)
    if find_spec("matplotlib") is None:
        assert code == 4 and "trirun[plot]" in err and not path.exists()
    else:
        assert code == 0 and path.read_bytes().startswith(b"\x89PNG")


def test_bare_bench_measures_this_machine(trirun, monkeypatch):
    from trirun_cli.bench import shapes as bench_shapes

    lists = {"cpu": parse_shapes("64x128", "cpu")}
    monkeypatch.setattr(bench_shapes, "load_shapes", lambda: lists)
    code, out, _ = trirun("bench", "--device", "cpu", "-q")
    assert code == 0 and "64 × 128" in out


@pytest.mark.parametrize(
    ("before", "command"), [(("--json",), "kernels"), (("--device", "cpu"), "model"), (("-q",), "f16acc")]
)
def test_options_before_the_command_are_refused(trirun, before, command):
    code, out, err = trirun("bench", *before, command, "--seconds", "0")
    option = {"-q": "--quiet"}.get(before[0], before[0])
    assert code == 2 and not out and f"{option} belongs after the command: trirun bench {command} {option}" in err


@pytest.mark.parametrize(("load", "said"), [(16.2, "load average 16.2 on 2 cores"), (0.5, None)])
def test_a_busy_machine_is_named(monkeypatch, load, said):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert busy() == said


@pytest.mark.parametrize("command", ["kernels", "model", "f16acc"])
def test_every_benchmark_says_that_the_machine_is_busy(trirun, monkeypatch, some_machine, command):
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(f16acc_bench, "PICTURE_N", 64)
    monkeypatch.setattr(f16acc_bench, "PICTURE_K", 2048)
    options = {
        "kernels": (*QUICK, "--m", "1"),
        "model": ("--shape", "tiny", "--batch", "1", "--context", "8", "--seconds", "0.001", "--device", "cpu"),
        "f16acc": ("--splits", "1", "--device", "cpu"),
    }
    code, out, err = trirun("bench", command, *options[command], "--json")
    assert code == 0 and json.loads(out)["busy"].startswith("load average 10000.0 on ")
    assert "cores: other work takes part in these timings" in " ".join(err.split())
