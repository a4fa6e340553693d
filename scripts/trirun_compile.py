"""Compiles kernels/csrc into the two libraries of trirun_kernels. Needs a C++ compiler, for CUDA also nvcc, and of
Python only the standard library.

Objects are kept in build/native under a hash of all that went into them (source, headers, flags, compiler), so a
build that changes nothing compiles nothing. Beside each library, build_<device>.json says how it was made.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trirun_toolchain import (
    ALL_ARCHS,
    BASELINE_FLAGS,
    CXX_FLAGS,
    ISA_FLAGS,
    ISAS,
    NVCC_FLAGS,
    BuildError,
    accepts,
    arch_of,
    cuda_runtime,
    cxx_compiler,
    gencode,
    old_glibc_linker,
    require_nvcc,
    static_runtime,
    version,
)

KEPT_OBJECTS = 4  # of one source file, so that builds with other flags can alternate


@dataclass(frozen=True, slots=True)
class Step:
    """A compiler call.

    Attributes:
        compiler: command words.
        made_by: name and version of every compiler that takes part.
        flags: what the output depends on.
        local: flags that name places on this machine or a number of processes; the output does not depend on them.
    """

    compiler: tuple[str, ...]
    made_by: str
    flags: tuple[str, ...]
    local: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.compiler, *self.local, *self.flags)

    def digest(self, *inputs: str) -> str:
        """16 hex digits that change whenever the output could."""
        return hashlib.sha256("\0".join((self.made_by, *self.flags, *inputs)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Tree:
    """Where sources, objects and libraries lie, and how much is said about building them."""

    root: Path = Path(__file__).resolve().parent.parent
    verbose: bool = False
    extra_flags: tuple[str, ...] = ()

    @property
    def csrc(self) -> Path:
        return self.root / "kernels" / "csrc"

    @property
    def objects(self) -> Path:
        return self.root / "build" / "native"

    @property
    def libraries(self) -> Path:
        return self.root / "kernels" / "trirun_kernels" / "_lib"

    @property
    def exports(self) -> str:
        """The linker's flag that hides all but the C interface."""
        return f"--version-script={(self.csrc / 'exports.map').relative_to(self.root)}"

    def report(self, device: str) -> dict[str, Any]:
        """How a library was built: compiler, instruction sets or architectures, objects. Empty before that."""
        path = self.libraries / f"build_{device}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def sources(self, device: str, suffix: str) -> list[Path]:
        found = sorted((self.csrc / device).rglob(f"*{suffix}"))
        if not found:
            raise BuildError(f"no {suffix} files in {self.csrc / device}: the source tree is incomplete")
        return found

    def object_name(self, device: str, source: Path) -> str:
        """``"decoder.sample"`` for cuda/decoder/sample.cu: names of objects tell folders apart."""
        return ".".join(source.relative_to(self.csrc / device).with_suffix("").parts)

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def run(self, command: Sequence[str], failure: str) -> str:
        """Standard error of a command run in the root: what it makes does not depend on where the tree lies."""
        if self.verbose:
            self.say(shlex.join(command))
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{failure}\n{done.stdout}{done.stderr}".rstrip())
        return done.stderr

    @contextmanager
    def locked(self, device: str) -> Iterator[None]:
        """One build of a device's library at a time in one tree."""
        self.objects.mkdir(parents=True, exist_ok=True)
        with open(self.objects / f"lock_{device}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def build_cpu(tree: Tree, glibc: str | None = None) -> Path:
    """Build libtrirun_cpu.so for every instruction set the compiler knows.

    Args:
        glibc: the oldest that it shall load with, such as ``"2.28"``; None: this machine's.

    Raises:
        BuildError: no compiler, or one that rejects a source file.
    """
    cxx, machine = cxx_compiler(), platform.machine()
    isa_flags, baseline = ISA_FLAGS.get(machine, {}), BASELINE_FLAGS.get(machine, ())
    flags: dict[Path, tuple[str, ...]] = {}
    built, skipped = [], {}
    for source in tree.sources("cpu", ".cpp"):
        isa = source.stem.rpartition("_")[2]
        flags[source] = baseline
        if isa not in ISAS:
            continue
        if isa not in isa_flags:
            skipped[isa] = f"not an instruction set of {machine}"
        elif not accepts(cxx, isa_flags[isa]):
            skipped[isa] = f"{version(cxx)} does not know all of {' '.join(isa_flags[isa])}"
            tree.say(f"trirun: {isa} is left out: {skipped[isa]}")
        else:
            flags[source] = isa_flags[isa]
            built.append(isa)
    made_by, common = version(cxx), (*CXX_FLAGS, *_tree_flags(tree))
    # The linker keeps the first copy of an inline function, so those compiled for every processor come first.
    ordered = sorted(flags, key=lambda source: len(flags[source]))
    steps = {source: Step(cxx, made_by, (*common, *flags[source])) for source in ordered}
    linker, runtime = (cxx, static_runtime(cxx)) if glibc is None else old_glibc_linker(cxx, glibc)
    flags_of_link = ("-shared", "-pthread", *runtime, f"-Wl,{tree.exports}", "-Wl,-z,defs")
    link = Step(linker, f"{made_by}, glibc {glibc}" if glibc else made_by, flags_of_link)
    return _build(tree, "cpu", steps, link, {"machine": machine, "isas": sorted({*built}), "skipped": skipped})


def build_cuda(tree: Tree, archs: Sequence[str] = ALL_ARCHS, glibc: str | None = None) -> Path:
    """Build libtrirun_cuda.so: machine code for these architectures and PTX of the newest.

    name_sm90.cu is compiled for sm_90a alone, whichever are asked for.

    Args:
        glibc: the oldest that it shall load with, such as ``"2.28"``; None: this machine's.

    Raises:
        BuildError: no nvcc, one too old, or one that rejects a source file; no zig to link for another glibc.
    """
    sources, nvcc, cxx = tree.sources("cuda", ".cu"), require_nvcc(), cxx_compiler()
    made_by, host = f"{version((nvcc,))}, {version(cxx)}", ("-ccbin", cxx[0])
    # Some more processes than cores, so that the last and longest file does not end on a single one.
    cores = os.cpu_count() or 1
    threads = ("--threads", str(max(2, cores // len(sources))))
    steps = {}
    # Those of the most text first, with all they include, so that the last to finish is a short one.
    for source in sorted(sources, key=lambda path: -sum(part.stat().st_size for part in included(tree, path))):
        only = arch_of(source)
        target = gencode([only], ptx=False) if only else gencode(archs, ptx=True)
        steps[source] = Step((nvcc,), made_by, (*NVCC_FLAGS, *target, *_tree_flags(tree)), (*host, *threads))
    flags = ["-shared", "-cudart", "static", "-Xlinker", tree.exports, "-Xlinker", "-z,defs"]
    if runtime := static_runtime(cxx):
        flags += ["-Xcompiler", ",".join(runtime)]
    # NVIDIA's wheels keep libcudart_static.a in lib, where their nvcc does not look.
    wheel_lib = Path(nvcc).resolve().parent.parent / "lib"
    link = Step((nvcc,), made_by, tuple(flags), (*host, *(("-L", str(wheel_lib)) if wheel_lib.is_dir() else ())))
    if glibc is not None:
        # No object holds device code that calls another's, so that nvcc has nothing to link. Stripped: nvcc names
        # objects' sources by its process, and two builds would differ.
        linker, files = old_glibc_linker(cxx, glibc)
        flags = ["-shared", "-pthread", *files, "-ldl", "-lrt", f"-Wl,-s,{tree.exports}", "-Wl,-z,defs"]
        link = Step(linker, f"{made_by}, glibc {glibc}", tuple(flags), (str(cuda_runtime(nvcc)),))
    return _build(tree, "cuda", steps, link, {"archs": list(archs)})


def compiler_logs(tree: Tree, device: str) -> dict[Path, str]:
    """What the compiler said about each source file of a library that was built."""
    objects = tree.report(device)["objects"]
    return {
        tree.csrc / device / name: (tree.objects / obj).with_suffix(".log").read_text() for name, obj in objects.items()
    }


def included(tree: Tree, source: Path) -> list[Path]:
    """The source and every file of csrc it includes, directly or not; conditional includes count."""
    seen: set[Path] = set()
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
            found = next((p.resolve() for p in (path.parent / name, tree.csrc / name) if p.is_file()), None)
            if found and found not in seen:
                waiting.append(found)
    return sorted(seen)


def _build(tree: Tree, device: str, steps: dict[Path, Step], link: Step, facts: dict[str, Any]) -> Path:
    library = tree.libraries / f"libtrirun_{device}.so"
    with tree.locked(device):
        objects = _compile_all(tree, device, steps)
        names = {source.relative_to(tree.csrc / device).as_posix(): obj.name for source, obj in objects.items()}
        key = link.digest(*names.values(), (tree.csrc / "exports.map").read_text())
        if tree.report(device).get("key") == key and library.exists():
            tree.say(f"trirun: {library.name} is up to date")
            return library
        tree.libraries.mkdir(parents=True, exist_ok=True)
        # Replaced in one step: a process that has the old library loaded keeps it whole.
        fresh = library.with_suffix(".partial")
        inputs = [str(obj.relative_to(tree.root)) for obj in objects.values()]
        tree.run((*link.command, *inputs, "-o", str(fresh)), f"{library.name} does not link")
        fresh.replace(library)
        report = {"compiler": link.made_by, **facts, "key": key, "objects": names}
        (tree.libraries / f"build_{device}.json").write_text(json.dumps(report, indent=1) + "\n")
        tree.say(f"trirun: built {library.name}, {library.stat().st_size / 2**20:.1f} MiB")
    return library


def _compile_all(tree: Tree, device: str, steps: dict[Path, Step]) -> dict[Path, Path]:
    """Each source file's object, compiled where it is not there yet, as many at once as there are cores."""
    objects, missing, csrc = {}, {}, tree.csrc.resolve()
    for source, step in steps.items():
        texts = [text for path in included(tree, source) for text in (str(path.relative_to(csrc)), path.read_text())]
        obj = tree.objects / f"{tree.object_name(device, source)}-{step.digest(*texts)}.o"
        objects[source] = obj
        if obj.exists():
            os.utime(obj)
        else:
            missing[source] = obj
    if missing:
        made_by = next(iter(steps.values())).made_by
        tree.say(f"trirun: compiling {len(missing)} of {len(steps)} files with {made_by}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [pool.submit(_compile, tree, source, steps[source], obj) for source, obj in missing.items()]
        try:
            for job in running:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return objects


def _compile(tree: Tree, source: Path, step: Step, obj: Path) -> None:
    name = source.relative_to(tree.root)
    partial = obj.with_suffix(".partial.o")
    command = (*step.command, "-c", str(name), "-o", str(partial.relative_to(tree.root)))
    log = tree.run(command, f"{name} does not compile with {step.made_by}")
    # Without the statistics of ptxas -v, and once: nvcc repeats a warning for every architecture.
    told = dict.fromkeys(line for line in log.splitlines() if not re.match(r"ptxas info|    \d+ bytes stack", line))
    if any("warning" in line for line in told):
        tree.say("\n".join(line for line in told if line))
    obj.with_suffix(".log").write_text(log)
    partial.replace(obj)
    others = [path for path in tree.objects.glob("*.o") if path.stem.rpartition("-")[0] == obj.stem.rpartition("-")[0]]
    for stale in sorted(others, key=lambda path: path.stat().st_mtime)[:-KEPT_OBJECTS]:
        stale.unlink()
        stale.with_suffix(".log").unlink(missing_ok=True)


def _tree_flags(tree: Tree) -> tuple[str, ...]:
    return (*tree.extra_flags, "-I", str(tree.csrc.relative_to(tree.root)))
