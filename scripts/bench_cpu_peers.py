"""trirun's native decoder beside llama.cpp on one CPU: the same ternary models, interleaved runs, medians.

Set up the peer once (its source comes with the llama-cpp-python package):

    python -m venv PEER && PEER/bin/pip install cmake ninja numpy diskcache jinja2 typing-extensions
    PEER/bin/pip download --no-deps --no-binary :all: -d PEER/src llama-cpp-python==0.3.36
    tar -C PEER/src -xf PEER/src/llama_cpp_python-*.tar.gz && rm -f PEER/src/llama_cpp_python-*/vendor/llama.cpp/.git
    PEER/bin/cmake -S PEER/src/llama_cpp_python-*/vendor/llama.cpp -B PEER/llama.cpp -G Ninja \\
        -DCMAKE_MAKE_PROGRAM=PEER/bin/ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF
    PEER/bin/cmake --build PEER/llama.cpp --target llama-bench llama-quantize

then run one of

    python scripts/bench_cpu_peers.py PEER                                # one model of 1.4 B: prompts and memory too
    python scripts/bench_cpu_peers.py PEER --families all --make          # files of every family: 50 minutes, 55 GB
    python scripts/bench_cpu_peers.py PEER --families all                 # their speeds: 15 minutes on an idle machine

Every measurement is a process of its own, so that peak memory is told apart; prefill is one prompt into an empty
context, decode the following tokens one by one from an empty context (llama-bench's pp and tg). ``--make`` checks every
family's tiny model, too: logits of llama.cpp from a file of float16 matrices beside trirun's. On a machine with other
work, ``--fifo`` gives either engine the cores while it decodes, for a second or two (SCHED_FIFO, needs the privilege).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_families
import peer_models
import peer_workers

WORKERS = Path(peer_workers.__file__)
# Relative difference (norm) of logits: float16 matrices there, an 8-bit cache nowhere.
ALLOWED = 0.01


@dataclass(slots=True)
class Row:
    """One engine and its measurements, a value per round.

    Attributes:
        command: with {} for how many tokens are decoded. read: its output as (prefill, decode), tokens/s.
        token_bytes: of weights that a token reads.
    """

    name: str
    command: list[str]
    read: Callable[[str], tuple[float, float]]
    token_bytes: int = 0
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def run(self, tokens: int) -> None:
        """Measure once."""
        text, peak = run_process([part.format(tokens) for part in self.command])
        prefill, decode = self.read(text)
        self.prefill.append(prefill)
        self.decode.append(decode)
        self.peak.append(peak)


def run_process(command: list[str]) -> tuple[str, float]:
    """Standard output of a command and its peak resident memory in MiB."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            last = "".join(errors.readlines()[-20:])
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{last}")
        return output.read(), usage.ru_maxrss / 1024


def worker(*question: object) -> list[str]:
    """The command of a worker. Measuring is apart from this process, whose memory must stay small: Linux counts a
    parent's peak as its child's."""
    return [sys.executable, str(WORKERS), *map(str, question)]


def ask(*question: object) -> str:
    """A worker's answer."""
    return run_process(worker(*question))[0]


def read_worker(text: str) -> tuple[float, float]:
    """(prefill, decode) tokens/s of a worker's answer."""
    prefill, decode = json.loads(text)
    return prefill, decode


def read_llama_bench(text: str) -> tuple[float, float]:
    """(prefill, decode) tokens/s of llama-bench's JSON; NaN for a test that it did not make."""
    tests = json.loads(text)
    prefill = next((test["avg_ts"] for test in tests if test["n_prompt"]), float("nan"))
    return prefill, next(test["avg_ts"] for test in tests if test["n_gen"])


def llama_cpp(peer: Path, *question: object) -> list[str]:
    """The command of llama.cpp's worker."""
    source = next((peer / "src").glob("llama_cpp_python-*/"))
    environment = [f"LLAMA_CPP_LIB_PATH={peer / 'llama.cpp' / 'bin'}", f"PYTHONPATH={source}"]
    program = [peer / "bin" / "python", WORKERS.with_name("llama_cpp_worker.py")]
    return ["env", *environment, *map(str, (*program, *question))]


def make_rows(arguments: Any, peer: Path, checkpoint: Path, files: list[Path], prompt: int) -> list[Row]:
    """The engines: trirun at each activation width, llama.cpp with each type."""
    threads, rows = str(arguments.threads), []
    fifo = ["fifo"] if arguments.fifo else []
    for bits in arguments.act_bits.split(","):
        command = worker("decode", checkpoint, threads, bits, prompt, "{}", *fifo)
        rows.append(Row(f"trirun, {bits}-bit activations", command, read_worker))
    for kind, file in zip(arguments.types.split(","), files, strict=True):
        if arguments.fifo:
            command = llama_cpp(peer, file, "--threads", threads, "--decode", "{}")
            rows.append(Row(f"llama.cpp {kind}", command, read_worker))
            continue
        bench = peer / "llama.cpp" / "bin" / "llama-bench"
        command = [str(bench), "-m", str(file), "-t", threads, "-p", str(prompt), "-n", "{}", "-r", "1", "-o", "json"]
        rows.append(Row(f"llama.cpp {kind}", command, read_llama_bench))
    return rows


def ratio(mine: list[float], theirs: list[float]) -> float:
    """The median of ratios taken round by round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def one_model(arguments: Any, peer: Path, models: Path) -> None:
    """The default model, with prompts, memory, and the bandwidth reached."""
    types, tools = arguments.types.split(","), peer / "llama.cpp" / "bin"
    config = peer_families.DEFAULT | {"num_hidden_layers": arguments.layers}
    folder = models / f"llama-{arguments.layers}-layers"
    checkpoint, files = peer_models.make(folder, config, tools / "llama-quantize", types)
    rows = make_rows(arguments, peer, checkpoint, files, arguments.prompt)
    for row, path in zip(rows, [checkpoint] * (len(rows) - len(files)) + files, strict=True):
        row.token_bytes = int(ask("bytes", path))
    speeds: list[float] = []
    for number in range(arguments.rounds):
        speeds.append(float(ask("bandwidth", arguments.threads, rows[0].token_bytes)))
        for row in rows:
            row.run(arguments.decode)
        print(f"round {number + 1} of {arguments.rounds}: {speeds[-1]:.1f} GB/s", file=sys.stderr)
    report(rows, speeds, arguments)


def report(rows: list[Row], speeds: list[float], arguments: Any) -> None:
    """A table of medians, ratios to the first peer taken round by round, and the share of the bandwidth reached."""
    peer = next(row for row in rows if row.name.startswith("llama.cpp"))
    read = statistics.median(speeds)
    print(f"{arguments.threads} threads; weights read at {read:.1f} GB/s ({min(speeds):.1f} to {max(speeds):.1f})")
    print(f"{'tokens/s':28} {'decode':>8} {'GB/s':>6} {'of read':>8} {'prefill':>8} {'peak MiB':>9}   to {peer.name}")
    for row in rows:
        decode, prefill, peak = map(statistics.median, (row.decode, row.prefill, row.peak))
        rate = decode * row.token_bytes / 1e9
        ratios = [ratio(getattr(row, key), getattr(peer, key)) for key in ("decode", "prefill", "peak")]
        print(
            f"{row.name:28} {decode:8.1f} {rate:6.1f} {rate / read:8.0%} {prefill:8.1f} {peak:9.0f}   "
            f"decode {ratios[0]:.2f}x prefill {ratios[1]:.2f}x peak {ratios[2]:.2f}x"
        )
    if arguments.json:
        values = {row.name: {key: getattr(row, key) for key in ("decode", "prefill", "peak")} for row in rows}
        arguments.json.write_text(json.dumps({"bandwidth": speeds, "rows": values}, indent=1))


def difference(peer: Path, folder: Path) -> dict[str, Any]:
    """How far llama.cpp's logits from a file of float16 matrices are from trirun's, and how many of the greedy tokens
    that follow are equal."""
    tokens = [(17 * index * index + 5) % 8000 + 3 for index in range(48)]
    exact = peer_models.exact_file(folder)
    with tempfile.TemporaryDirectory() as scratch:
        logits, prompt = Path(scratch) / "logits.npy", ",".join(map(str, tokens))
        greedy = run_process(llama_cpp(peer, exact, "--logits", logits, "--prompt", prompt))[0].splitlines()[-1]
        return json.loads(ask("compare", folder / "trirun", logits, prompt, greedy.replace(" ", "")))


def make_families(arguments: Any, peer: Path, models: Path, families: list[str]) -> int:
    """Files of every family, and the check. Returns how many are not equal."""
    different = 0
    for family in families:
        for name, config in peer_families.configs(family).items():
            folder = peer_models.folder_of(models, family, name)
            quantize = peer / "llama.cpp" / "bin" / "llama-quantize"
            peer_models.make(folder, config, quantize, arguments.types.split(","))
            if name == "tiny":
                found = difference(peer, folder)
                equal = found["difference"] <= ALLOWED
                different += not equal
                print(
                    f"{family:14} {'equal' if equal else 'NOT EQUAL'}: logits differ by {found['difference']:.2%}, "
                    f"{found['same']} of {found['greedy']} greedy tokens are the same",
                    flush=True,
                )
    return different


def measure_families(arguments: Any, peer: Path, models: Path, families: list[str]) -> None:
    """The table of decoding speeds."""
    types, found = arguments.types.split(","), dict[str, Any]()
    print(f"tokens/s, {arguments.threads} threads, medians of {arguments.rounds}; x: to llama.cpp, round by round\n")
    names = [f"trirun {bits} bits" for bits in arguments.act_bits.split(",")] + [f"llama.cpp {kind}" for kind in types]
    ratios = [f"{name.removeprefix('trirun ')}, x" for name in names if name.startswith("trirun")]
    print(f"| family | model | {' | '.join([*names, *ratios])} |\n|---|---|{'--:|' * (len(names) + len(ratios))}")
    for family in families:
        for name in peer_families.configs(family):
            folder = peer_models.folder_of(models, family, name)
            files = [folder / f"{kind}.gguf" for kind in types]
            if not all(file.exists() for file in files):
                sys.exit(f"{folder} has no files: --make first")
            rows = make_rows(arguments, peer, folder / "trirun", files, 0)
            for _ in range(arguments.rounds):
                for row in rows:
                    row.run(arguments.decode * (8 if name == "tiny" else 1))
            first = next(row for row in rows if row.name.startswith("llama.cpp"))
            speeds = [f"{statistics.median(row.decode):.4g}" for row in rows]
            speeds += [f"{ratio(row.decode, first.decode):.2f}" for row in rows if row.name.startswith("trirun")]
            print(f"| {family} | {name} | {' | '.join(speeds)} |", flush=True)
            found[f"{family}, {name}"] = {row.name: row.decode for row in rows}
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))


def main() -> int:
    """The command. Returns 1 when some family is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path, help="the peer's folder, see above")
    parser.add_argument("--models", type=Path, help="where the model files go [PEER/models]")
    parser.add_argument(
        "--types", default="TQ2_0", help="GGUF types, comma-separated, the first to compare with: TQ2_0,TQ1_0,Q2_0"
    )
    parser.add_argument("--families", help="model types, comma-separated, or all: their table of decoding speeds")
    parser.add_argument("--make", action="store_true", help="make and check the families' files, measure nothing")
    parser.add_argument("--act-bits", default="16,8", help="trirun's activation widths, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, help="of the one model")
    parser.add_argument(
        "--decode", type=int, default=48, help="tokens that are decoded; eight times as many by tiny models"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fifo", action="store_true", help="ahead of every other program on this machine")
    parser.add_argument("--layers", type=int, default=peer_families.DEFAULT["num_hidden_layers"])
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    arguments = parser.parse_args()
    peer = arguments.peer.absolute()
    models = arguments.models or peer / "models"
    if arguments.families is None:
        one_model(arguments, peer, models)
        return 0
    families = [*peer_families.FAMILIES] if arguments.families == "all" else arguments.families.split(",")
    if unknown := sorted(set(families) - set(peer_families.FAMILIES)):
        parser.error(f"--families: {unknown[0]} is none of {', '.join(peer_families.FAMILIES)}")
    if arguments.make:
        return int(make_families(arguments, peer, models, families) > 0)
    measure_families(arguments, peer, models, families)
    return 0


if __name__ == "__main__":
    sys.exit(main())
