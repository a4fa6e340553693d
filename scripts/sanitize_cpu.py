"""Run tests with the CPU library built under a sanitizer of the compiler: ``address``, undefined behaviour included, or
``thread``, data races.

    python scripts/sanitize_cpu.py address                                  # kernels, decoder, engine, wrong calls
    python scripts/sanitize_cpu.py thread tests/engine -k readers           # arguments go to pytest
    python scripts/sanitize_cpu.py address --calls 2000                     # wrong calls alone

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
    options, tests = parser.parse_known_args()
    place = copied(options.kind)
    # The sanitizer's flags are the compiler's, so that it links with them too. Less optimization, for its speed.
    code = (
        "import sys; sys.path.insert(0, 'scripts'); from trirun_compile import Tree, build_cpu; "
        "build_cpu(Tree(extra_flags=('-O1', '-g1', '-fno-omit-frame-pointer')))"
    )
    cxx = {**os.environ, "CXX": " ".join((*cxx_compiler(), FLAGS[options.kind]))}
    subprocess.run([sys.executable, "-c", code], cwd=place, env=cxx, check=True)
    if options.calls:
        command = [sys.executable, "scripts/fuzz_abi.py", "--calls", str(options.calls), "--seconds", "600"]
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(tests or TESTS[options.kind])]
    if options.kind == "thread":
        # Its shadow memory wants the addresses that it knows.
        command = ["setarch", platform.machine(), "-R", *command]
    for old in place.glob(f"{REPORT}.*"):
        old.unlink()
    code = subprocess.run(command, cwd=place, env=environment(options.kind, place), check=False).returncode
    reports = sorted(place.glob(f"{REPORT}.*"))
    for report in reports:
        print(report.read_text(errors="replace"), file=sys.stderr)
    return code or bool(reports)


if __name__ == "__main__":
    sys.exit(main())
