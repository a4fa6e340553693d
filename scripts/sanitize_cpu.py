"""Run tests with the CPU library built under a sanitizer of the compiler: ``address``, undefined behaviour included, or
``thread``, data races.

    python scripts/sanitize_cpu.py address                                  # kernels, decoder, engine, wrong calls
    python scripts/sanitize_cpu.py thread tests/engine -k readers           # arguments go to pytest
    python scripts/sanitize_cpu.py address --calls 2000                     # wrong calls alone
    python scripts/sanitize_cpu.py address --quick                          # what continuous integration runs

A copy of the tracked files below build/sanitized is built and tested: the library in place stays as it is. Needs g++
with its libasan, libubsan and libtsan. Python's own memory is not looked at, nor what torch's threads do.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from trirun_toolchain import cxx_compiler

ROOT = Path(__file__).resolve().parent.parent
REPORT = "report"
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
RUNTIME = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    # Python frees little of what it has at its end, and torch's own allocations are not ours.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # How torch's threads wait for each other is not known: only what the library does itself counts. A child of a fork
    # may start threads: the pool does.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0:die_after_fork=0",
}
_DECODER = ["tests/kernels/decoder", "tests/engine"]
TESTS = {
    "address": ["tests/kernels/gemm", *_DECODER, "tests/backends", "tests/kernels/test_abi.py"],
    "thread": ["tests/kernels/gemm/test_cpu.py", *_DECODER, "tests/backends/test_cpu_model.py"],
}

# A step of the decoder on every instruction set, and an operator: most lines of the library.
QUICK_CALLS, QUICK = 2000, [
    "tests/kernels/decoder/test_cpu_ops.py", "tests/kernels/gemm/test_cpu.py",
    "-k", "every_instruction_set or eight_bit_activations or operator_on_views or bad_arguments",
]  # fmt: skip

# Reads 4096 bytes of 64: what the address sanitizer must end.
BEYOND = """
import ctypes
from trirun_kernels.native import cpu
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype = ctypes.c_void_p
cpu().trirun_cpu_read(ctypes.c_void_p(libc.aligned_alloc(64, 64)), 4096, 1, ctypes.byref(ctypes.c_uint64()))
"""


def copied(kind: str) -> Path:
    """A folder with the tracked files as they are now, and what an earlier build of it left."""
    place = ROOT / "build" / "sanitized" / kind
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        target = place / name
        if (ROOT / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return place


def environment(kind: str, place: Path) -> dict[str, str]:
    """In which Python loads the sanitizer first, and packages from the copy."""
    paths = os.pathsep.join(str(place / part) for part in ("", "gptq", "kernels", "scripts"))
    # pytest keeps what goes to stderr, and what ends a process takes that along.
    options = {name: f"{value}:log_path={place / REPORT}" for name, value in OPTIONS.items()}
    preloaded = " ".join(map(_library, RUNTIME[kind]))
    return {**os.environ, **options, "PYTHONPATH": paths, "LD_PRELOAD": preloaded, "OMP_NUM_THREADS": "1"}


def _library(name: str) -> str:
    found = subprocess.run([*cxx_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"error: {cxx_compiler()[0]} has no {name}: install its sanitizers")
    return str(path.resolve())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    parser.add_argument("--calls", type=int, help="only so many wrong calls of scripts/fuzz_abi.py, and no tests")
    parser.add_argument(
        "--quick", action="store_true", help="wrong calls and few tests, of a build that takes half as long"
    )
    options, tests = parser.parse_known_args()
    place = copied(options.kind)
    # The sanitizer's flags are the compiler's, so that it links with them too. Less optimization, for its speed.
    optimized = "-O0" if options.quick else "-O1"
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from trirun_compile import Tree, build_cpu; "
        f"build_cpu(Tree(extra_flags=('{optimized}', '-g1', '-fno-omit-frame-pointer')))"
    )
    cxx = {**os.environ, "CXX": " ".join((*cxx_compiler(), FLAGS[options.kind]))}
    subprocess.run([sys.executable, "-c", code], cwd=place, env=cxx, check=True)
    commands = []
    if calls := QUICK_CALLS if options.quick else options.calls:
        commands.append(["scripts/fuzz_abi.py", "--calls", str(calls), "--seconds", "600"])
    if options.quick or not options.calls:
        chosen = QUICK if options.quick else TESTS[options.kind]
        commands.append(["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *(tests or chosen)])
    if options.kind == "address" and not run(place, ["-c", BEYOND], "address")[1]:
        raise SystemExit("error: the sanitizer does not see a read beyond an array")
    failed = False
    for command in commands:
        ended, reports = run(place, command, options.kind)
        print(*reports, sep="\n", end="", file=sys.stderr)
        failed |= bool(ended or reports)
    return failed


def run(place: Path, command: list[str], kind: str) -> tuple[int, list[str]]:
    """Python's exit code, and what the sanitizer has to report."""
    # The thread sanitizer's shadow memory wants the addresses that it knows.
    before = ["setarch", platform.machine(), "-R"] if kind == "thread" else []
    for old in place.glob(f"{REPORT}.*"):
        old.unlink()
    done = subprocess.run([*before, sys.executable, *command], cwd=place, env=environment(kind, place), check=False)
    return done.returncode, [file.read_text(errors="replace") for file in sorted(place.glob(f"{REPORT}.*"))]


if __name__ == "__main__":
    sys.exit(main())
