"""trirun's native decoder beside llama.cpp on one CPU: the same ternary model, interleaved runs, medians.

Set up the peer once (its source comes with the llama-cpp-python package):

    python -m venv PEER && PEER/bin/pip install cmake ninja numpy gguf scikit-build-core
    PEER/bin/pip download --no-deps --no-binary :all: --no-build-isolation -d PEER/src llama-cpp-python
    tar -C PEER/src -xf PEER/src/llama_cpp_python-*.tar.gz
    PEER/bin/cmake -S PEER/src/llama_cpp_python-*/vendor/llama.cpp -B PEER/llama.cpp -G Ninja \\
        -DCMAKE_MAKE_PROGRAM=PEER/bin/ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF
    PEER/bin/cmake --build PEER/llama.cpp --target llama-bench llama-quantize

then run ``python scripts/bench_cpu_peers.py PEER``. Every measurement is a process of its own, so that peak memory is
told apart; prefill is one prompt into an empty context, decode the following tokens one by one from an empty context
(llama-bench's pp and tg).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_models

WORKER = "--worker"
MIB = 2**20


@dataclass(slots=True)
class Row:
    """One engine and its measurements, a value per round."""

    name: str
    command: list[str]
    read: Callable[[str], tuple[float, float]]
    token_bytes: int
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Measure once."""
        text, peak = run_process(self.command)
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
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()}")
        return output.read(), usage.ru_maxrss / 1024


def worker(arguments: list[str]) -> None:
    """Measure in this process, apart from the parent, whose memory must stay small: Linux counts a parent's peak as its
    child's."""
    if arguments[0] == "bandwidth":
        print(bandwidth(int(arguments[1]), int(arguments[2])))
    elif arguments[0] == "bytes":
        print(trirun_token_bytes(Path(arguments[1])))
    else:
        run_trirun(arguments)


def run_trirun(arguments: list[str]) -> None:
    """Prefill and decode: checkpoint, threads, act_bits, prompt and decode lengths."""
    from trirun_cli.backends.cpu.decoder import NativeDecoder

    checkpoint, threads, act_bits, prompt, length = arguments[0], *map(int, arguments[1:])
    decoder = NativeDecoder(checkpoint, threads=threads, act_bits=act_bits, context=2048)
    tokens = [17 * i % decoder.shape.vocab for i in range(max(prompt, length))]

    def decode(count: int) -> float:
        started = time.perf_counter()
        for position in range(count):
            decoder.forward(tokens[position : position + 1], position=position)
        return count / (time.perf_counter() - started)

    def prefill() -> float:
        started = time.perf_counter()
        decoder.forward(tokens[:prompt])
        return prompt / (time.perf_counter() - started)

    prefill(), decode(2)
    print(json.dumps([prefill(), decode(length)]))


def ask(*question: object) -> str:
    """A worker's answer."""
    return run_process([sys.executable, __file__, WORKER, *map(str, question)])[0]


def read_worker(text: str) -> tuple[float, float]:
    """(prefill, decode) tokens/s of a worker's answer."""
    prefill, decode = json.loads(text)
    return prefill, decode


def read_llama_bench(text: str) -> tuple[float, float]:
    """(prefill, decode) tokens/s of llama-bench's JSON."""
    tests = json.loads(text)
    prefill = next(test["avg_ts"] for test in tests if test["n_prompt"])
    return prefill, next(test["avg_ts"] for test in tests if test["n_gen"])


def bandwidth(threads: int, size: int) -> float:
    """GB/s of reading `size` bytes again and again from 2 MiB pages with the library's own probe, median of sixty.

    The size is that of a token's weights: what a large cache keeps from one pass to the next, it keeps in decoding too.
    """
    import ctypes

    from trirun_kernels import native

    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, size, MIB):
        memory[start] = 1
    buffer = (ctypes.c_char * size).from_buffer(memory)
    seconds = []
    for _ in range(60):
        started = time.perf_counter()
        native.cpu().trirun_cpu_read(buffer, size, threads, ctypes.byref(ctypes.c_uint64()))
        seconds.append(time.perf_counter() - started)
    return size / statistics.median(seconds) / 1e9


def trirun_token_bytes(checkpoint: Path) -> int:
    """Bytes of weights that one token reads: packed layers and the 8-bit head."""
    from trirun_cli.checkpoint.reader import Checkpoint

    packed = sum(Checkpoint(checkpoint).packed(module).nbytes for module in Checkpoint(checkpoint).modules)
    return packed + peer_models.SHAPE["vocab_size"] * peer_models.SHAPE["hidden_size"]


def gguf_token_bytes(peer_python: Path, file: Path) -> int:
    """Bytes of weights that one token reads from a GGUF file: all but the embedding."""
    code = (
        "import sys, gguf; print(sum(int(t.n_bytes) for t in gguf.GGUFReader(sys.argv[1]).tensors "
        "if t.name != 'token_embd.weight'))"
    )
    done = subprocess.run([peer_python, "-c", code, file], capture_output=True, text=True, check=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path, help="the peer's folder, see above")
    parser.add_argument("--models", type=Path, help="where the model files go, 2.5 GB [PEER/models]")
    parser.add_argument(
        "--types", default="TQ2_0", help="GGUF types, comma-separated, the first to compare with: TQ2_0,TQ1_0"
    )
    parser.add_argument("--act-bits", default="8,16", help="trirun's activation widths, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=peer_models.SHAPE["num_hidden_layers"])
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    arguments = parser.parse_args()
    peer, types = arguments.peer.absolute(), arguments.types.split(",")
    tools, python = peer / "llama.cpp" / "bin", peer / "bin" / "python"
    models = arguments.models or peer / "models"
    checkpoint, files = peer_models.make_all(models, python, tools / "llama-quantize", types, arguments.layers)
    rows = make_rows(arguments, checkpoint, files, python, tools / "llama-bench")
    speeds: list[float] = []
    for number in range(arguments.rounds):
        speeds.append(float(ask("bandwidth", arguments.threads, rows[0].token_bytes)))
        for row in rows:
            row.run()
        print(f"round {number + 1} of {arguments.rounds}: {speeds[-1]:.1f} GB/s", file=sys.stderr)
    report(rows, speeds, arguments)


def make_rows(arguments: Any, checkpoint: Path, files: list[Path], python: Path, llama_bench: Path) -> list[Row]:
    """The engines: trirun at each activation width, llama.cpp with each type."""
    lengths, rows = [str(arguments.prompt), str(arguments.decode)], []
    token_bytes = int(ask("bytes", checkpoint))
    for bits in arguments.act_bits.split(","):
        command = [sys.executable, __file__, WORKER, str(checkpoint), str(arguments.threads), bits, *lengths]
        rows.append(Row(f"trirun, {bits}-bit activations", command, read_worker, token_bytes))
    for kind, file in zip(arguments.types.split(","), files, strict=True):
        command = [str(llama_bench), "-m", str(file), "-t", str(arguments.threads), "-p", lengths[0], "-n", lengths[1]]
        command += ["-r", "1", "-o", "json"]
        rows.append(Row(f"llama.cpp {kind}", command, read_llama_bench, gguf_token_bytes(python, file)))
    return rows


def report(rows: list[Row], speeds: list[float], arguments: Any) -> None:
    """A table of medians, ratios to the first peer taken round by round, and the share of the bandwidth reached."""
    peer = next(row for row in rows if row.name.startswith("llama.cpp"))
    read = statistics.median(speeds)
    print(f"{arguments.threads} threads; weights read at {read:.1f} GB/s ({min(speeds):.1f} to {max(speeds):.1f})")
    print(f"{'tokens/s':28} {'decode':>8} {'GB/s':>6} {'of read':>8} {'prefill':>8} {'peak MiB':>9}   to {peer.name}")
    for row in rows:
        decode, prefill, peak = map(statistics.median, (row.decode, row.prefill, row.peak))
        rate = decode * row.token_bytes / 1e9
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(getattr(row, key), getattr(peer, key), strict=True))
            for key in ("decode", "prefill", "peak")
        ]
        print(
            f"{row.name:28} {decode:8.1f} {rate:6.1f} {rate / read:8.0%} {prefill:8.1f} {peak:9.0f}   "
            f"decode {ratios[0]:.2f}x prefill {ratios[1]:.2f}x peak {ratios[2]:.2f}x"
        )
    if arguments.json:
        values = {row.name: {key: getattr(row, key) for key in ("decode", "prefill", "peak")} for row in rows}
        arguments.json.write_text(json.dumps({"bandwidth": speeds, "rows": values}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(sys.argv[2:])
    else:
        main()
