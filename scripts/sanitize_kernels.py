"""Run the CUDA kernels' tests under compute-sanitizer: out-of-bounds, uninitialised and racing accesses.

    python scripts/sanitize_kernels.py [--tool memcheck,racecheck,initcheck,synccheck] [--only decode] [--logs DIR]

Needs a GPU and compute-sanitizer of a CUDA toolkit. The tests are 10 to 100 times slower so, hence a selection that
runs every kernel at small shapes; runs go on side by side (nothing is timed). Exit code 1 if a test failed, was cut by
the limit or an error was found in a kernel of trirun.

What the tools do not see is told apart by kernel, and by source line where the library was built with --lineinfo:
racecheck does not follow mbarriers and reports their hand-overs as hazards, and stores to other CTAs of a cluster as
such to a CTA that may have ended; initcheck does not see what the copy engine writes. Products to compare with are
made on the CPU: racecheck of CUDA 13.0 ends with an internal error in cuBLAS, and initcheck takes what that writes for
not initialised. Outputs that torch allocates for a caller are filled first, with NaN, under initcheck. Under racecheck
every test is a process of its own.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# name: (test file below tests/kernels, -k expression). Captured graphs are left out: they need the caching allocator.
SELECTIONS = {
    "decode": (
        "gemm/test_cuda_stream.py",
        "any_shape or strided or one_code or identity or not_a_number or zero_rows or quantized_activations",
    ),
    "decode rows": ("gemm/test_cuda_stream.py", "every_row_count and dtype0"),
    "prefill tails": ("gemm/test_cuda_prefill.py", "tails_of_n_and_k and (1001 or 63)"),
    "prefill grids": ("gemm/test_cuda_prefill.py", "every_grid and float16"),
    "prefill int8": ("gemm/test_cuda_prefill.py", "int8_activations and float16"),
    "prefill shared": (
        "gemm/test_cuda_prefill_shared.py",
        "(pairs_of_a_tile and 4-64]) or (shares_of_several and (64-192 or 64-128))",
    ),
    "prefill other": ("gemm/test_cuda_prefill.py", "identity_reads or dense_weight or spoils_only_itself"),
    "decoder rows": ("decoder/test_cuda_ops.py", "test_rows and -96-"),
    "decoder attention": ("decoder/test_cuda_ops.py", "test_attention and dtype0"),
    "decoder head": ("decoder/test_cuda_head.py", "sixteen and numbers1-dtype0 and not waits"),
    "decoder sampling": ("decoder/test_cuda_sampling.py", "203 and not draws"),
    "decoder step": ("decoder/step/test_cuda_step.py", "texts_against and 16 or rows_of_a_batch and dtype0"),
    "experts": ("decoder/test_cuda_experts.py", "equal_experts or nan_stays or weighted_sum"),
    "mixture rows": ("decoder/test_cuda_mixture.py", "(row_is_made or rows_that_are) and 16-dtype0"),
    "gated deltanet": ("decoder/test_cuda_delta.py", "dtype0 and sizes2 or limbs"),
    "f16acc tails": ("f16acc/test_f16acc_cuda.py", "every_plan_on_every_tail and not 4104 and not 4096"),
    "f16acc other": ("f16acc/test_f16acc_cuda.py", "transposed_operands or any_shape"),
}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_OURS = re.compile(r"trirun::(?:<unnamed>::|\(anonymous namespace\)::)?\w+")
_LINE = re.compile(r"([\w-]+\.cuh?:\d+)")
# Pytest with torch's empty tensors filled: with NaN, where they hold floats.
_FILLED = "import sys, pytest, torch; torch.use_deterministic_algorithms(True, warn_only=True); sys.exit(pytest.main())"


@dataclass(slots=True)
class Outcome:
    """What one tool said of one selection."""

    tool: str
    selection: str
    passed: int
    failed: int
    errors: int
    unfinished: int  # processes in which the tool did not reach its summary
    lost: int  # reports that the tool had no room for
    kernels: dict[str, int]  # reports by kernel: those of trirun by name, the others together
    places: dict[str, int]  # of those of trirun, by source lines if the library has them
    seconds: float

    @property
    def clean(self) -> bool:
        """No report, or under initcheck and racecheck none of a kernel of trirun."""
        ours = self.errors if self.tool == "memcheck" else sum(self.kernels.values()) - self.kernels.get("others", 0)
        return ours == self.lost == self.failed == self.unfinished == 0 and self.passed > 0


def _selected(selection: str) -> list[str]:
    file, expression = SELECTIONS[selection]
    return [str(ROOT / "tests" / "kernels" / file), "-k", expression]


def tests_of(selection: str) -> list[str]:
    """The selection's tests, by pytest's names."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *_selected(selection)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "::" in line]


def run(sanitizer: str, tool: str, selection: str, test: str | None, limit: float, log: Path) -> Outcome:
    """One selection, or one test of it, under one tool; what it prints goes to a file."""
    command = [sanitizer, "--tool", tool, "--show-backtrace", "no", "--print-limit", "100000"]
    # What others write has to be seen, for initcheck; else their kernels, of the references, only take time.
    command += [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=trirun"]
    command += [sys.executable, *(("-c", _FILLED) if tool == "initcheck" else ("-m", "pytest"))]
    command += ["-q", "--tb=line", "-p", "no:cacheprovider"]
    command += [test] if test else _selected(selection)
    # Every tensor an allocation of its own, so that one byte behind it is out of bounds and its memory not yet written.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRIRUN_REFERENCE": "cpu"}
    started = time.monotonic()
    # A run that the limit cuts leaves no summary: it is reported as unfinished.
    with log.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=limit, check=False)
    text = log.read_text(errors="replace")
    ended = re.findall(r"^.* in [\d.]+s.*$", text, re.MULTILINE)  # pytest's last line
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", "".join(ended[-1:]))}
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*?\((\d+) errors", text)
    lost = re.search(r"(\d+) errors were skipped", text)
    kernels, places = _count(text)
    return Outcome(
        tool=tool,
        selection=selection,
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        errors=0 if summary is None else int(summary[1] or summary[2]),
        unfinished=int(summary is None or "internal error" in text.lower()),
        lost=int(lost[1]) if lost else 0,
        kernels=kernels,
        places=places,
        seconds=round(time.monotonic() - started, 1),
    )


def together(parts: list[Outcome]) -> Outcome:
    """What a tool said of the tests of one selection."""
    kernels: collections.Counter[str] = collections.Counter()
    places: collections.Counter[str] = collections.Counter()
    for part in parts:
        kernels.update(part.kernels)
        places.update(part.places)
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("passed", "failed", "errors", "unfinished")}
    return Outcome(
        tool=parts[0].tool,
        selection=parts[0].selection,
        **sums,
        lost=sum(part.lost for part in parts),
        kernels=dict(kernels.most_common()),
        places=dict(sorted(places.items())),
        seconds=round(sum(part.seconds for part in parts), 1),
    )


def _count(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Reports by kernel, and by the lines of source that each names; a race's are those of both accesses."""
    kernels: collections.Counter[str] = collections.Counter()
    places: collections.Counter[str] = collections.Counter()
    first = ""
    for line in text.splitlines():
        race = "Race reported between" in line
        # Not at the beginning of a line: pytest's dots may be before it.
        if "========= " not in line or not (race or " at " in line or " and " in line):
            continue
        ours, at = _OURS.search(line), _LINE.search(line)
        if " and " not in line or race:
            kernels[ours[0] if ours else "others"] += 1
        if ours and race:
            first = f"{ours[0]}: {at[1]}" if at else ""
        elif ours and at:
            places[f"{first} / {at[1]}" if " and " in line and first else f"{ours[0]}: {at[1]}"] += 1
    return dict(kernels.most_common()), dict(sorted(places.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", default=",".join(TOOLS), help="comma-separated; default: all")
    parser.add_argument("--only", default=",".join(SELECTIONS), help="comma-separated selections; default: all")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a selection, or test, under one tool")
    parser.add_argument("--jobs", type=int, default=8, help="runs side by side")
    parser.add_argument("--logs", type=Path, help="directory for the tools' output; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools, names = options.tool.split(","), options.only.split(",")
    for value, known in ((tools, TOOLS), (names, SELECTIONS)):
        if unknown := sorted(set(value) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; one of {', '.join(known)}")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        parser.exit(4, "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit\n")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sanitize-"))
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        single = dict(zip(names, pool.map(tests_of, names), strict=True)) if "racecheck" in tools else {}
        runs = {}
        for tool, name in itertools.product(tools, names):
            tests: list[str | None] = [*single[name]] if tool == "racecheck" else [None]
            stem = f"{tool}-{name.replace(' ', '-')}"
            runs[tool, name] = [
                pool.submit(run, sanitizer, tool, name, test, options.limit, logs / f"{stem}-{i}.log")
                for i, test in enumerate(tests)
            ]
        for (tool, name), parts in runs.items():
            outcomes.append(result := together([part.result() for part in parts]))
            found = f"{result.errors} errors" + (f", {result.unfinished} unfinished" if result.unfinished else "")
            found += f", {result.lost} more lost" if result.lost else ""
            line = f"{tool:10} {name:18} {result.passed:4} passed {result.failed:3} failed  {found}"
            print(f"{line}  {result.seconds:.0f} s  {result.kernels or ''}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in outcomes], indent=2))
    print(f"logs: {logs}", file=sys.stderr)
    return 0 if all(result.clean for result in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
