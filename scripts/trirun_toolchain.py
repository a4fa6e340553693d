"""Which compilers there are, and the flags each kind of source file is compiled with."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# -ffp-contract=off: a product and a sum become one rounding only where the source says so, on every instruction set.
CXX_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread", "-Wall"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"),
)
NVCC_FLAGS = (
    *("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-pthread", "-Xptxas", "-v"),
    # What only one architecture's code uses is unused, and no mistake, when the others are compiled.
    *("-diag-suppress", "177"),
)

# Never -march=native: a library built here must run on any machine of the same architecture.
BASELINE_FLAGS = {"x86_64": ("-march=x86-64",)}

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512VNNI = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))
# name_<isa>.cpp is compiled with these flags, any other name for the baseline. The dispatcher must have checked every
# feature listed before it calls into such a file. Where the processor or the compiler does not know <isa>, the file is
# compiled for the baseline too: it must ask for __AVX2__ and its like, and then say that it has nothing to offer.
ISA_FLAGS = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512vnni": _AVX512VNNI,
        "amx": (*_AVX512VNNI, "-mamx-tile", "-mamx-int8"),
    }
}
ISAS = frozenset(isa for table in ISA_FLAGS.values() for isa in table)

ALL_ARCHS = ("80", "86", "89", "90a", "100", "120")
# Machine code of the first is made from PTX of the second: no kernel asks for more than tells these pairs apart, and
# PTX takes as long to make as machine code.
PTX_OF = {"86": "80", "89": "80", "120": "100"}
MIN_CUDA = (12, 8)  # the first to know sm_100 and sm_120
# NVIDIA's compiler as wheels, for machines without a CUDA toolkit: nvcc is then in nvidia/cu13/bin of site-packages.
CUDA_WHEELS = tuple(f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl"))


class BuildError(Exception):
    """The build cannot go on: the first line of the message says why, the rest is the compiler's."""


def cxx_compiler() -> tuple[str, ...]:
    """$CXX or g++, as command words.

    Raises:
        BuildError: it is not on PATH.
    """
    words = tuple(shlex.split(os.environ.get("CXX") or "g++"))
    if shutil.which(words[0]) is None:
        raise BuildError(f"no C++ compiler: {words[0]} is not on PATH; install g++ (8 or newer) or set CXX to another")
    return words


def find_nvcc() -> str | None:
    """The first nvcc that is new enough: on PATH, under $CUDA_HOME, in the usual place, or from NVIDIA's wheels."""
    places = [shutil.which("nvcc")]
    places += [f"{home}/bin/nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    places += [f"{entry}/nvidia/cu13/bin/nvcc" for entry in sys.path if entry]
    for place in places:
        if place and Path(place).is_file():
            release = re.search(r"release (\d+)\.(\d+)", _version_text((place,)))
            if release and (int(release[1]), int(release[2])) >= MIN_CUDA:
                return place
    return None


def require_nvcc() -> str:
    """:func:`find_nvcc`, or an error that says what to install.

    Raises:
        BuildError: there is none.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            f"no nvcc of CUDA {'.'.join(map(str, MIN_CUDA))} or newer: install the CUDA toolkit, or "
            f"`pip install {' '.join(CUDA_WHEELS)}`, or set TRIRUN_CUDA=0 to build without CUDA"
        )
    return nvcc


def version(compiler: Sequence[str]) -> str:
    """Name and version of a compiler in one line."""
    lines = _version_text(tuple(compiler)).strip().splitlines()
    release = next((line for line in lines if "release" in line), None)
    return f"nvcc {release.rpartition('V')[2]}" if release else (lines or [compiler[0]])[0]


def accepts(cxx: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether a C++ compiler knows all these flags."""
    probe = (*cxx, *flags, "-E", "-x", "c++", os.devnull, "-o", os.devnull)
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def static_runtime(cxx: Sequence[str]) -> tuple[str, ...]:
    """Flags that link the C++ runtime in, where its archive is installed: the library then loads into any Python,
    also one that brings an older libstdc++ of its own."""
    found = subprocess.run((*cxx, "-print-file-name=libstdc++.a"), capture_output=True, text=True, check=False)
    return ("-static-libstdc++", "-static-libgcc") if os.path.isabs(found.stdout.strip()) else ()


def old_glibc_linker(cxx: Sequence[str], glibc: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A linker, and its flags in the place of :func:`static_runtime`, by which a library loads with a glibc as old as
    ``"2.28"``: zig brings that glibc's symbols (package ziglang), and machine code stays the compiler's. The C++
    runtime stays outside: its archive needs the glibc of this machine, and what the library uses of the shared one is
    of 2016 (GLIBCXX_3.4.22).

    Raises:
        BuildError: there is no zig.
    """
    zig = (sys.executable, "-m", "ziglang")
    if subprocess.run((*zig, "version"), capture_output=True, check=False).returncode:
        raise BuildError("linking for an older glibc takes zig: pip install ziglang")
    files = []
    for name in ("libstdc++.so", "libgcc_s.so.1", "libgcc.a"):
        found = subprocess.run((*cxx, f"-print-file-name={name}"), capture_output=True, text=True, check=False)
        files.append(os.path.realpath(found.stdout.strip()))
    return (*zig, "cc", "-target", f"{platform.machine()}-linux-gnu.{glibc}"), (*files, "-lm")


def cuda_runtime(nvcc: str) -> Path:
    """The archive of CUDA's runtime, for a linker that is not nvcc.

    Raises:
        BuildError: it is not where nvcc looks, nor where NVIDIA's wheels have it.
    """
    link = (nvcc, "--dryrun", "-shared", "-o", "x.so", "x.o")
    told = subprocess.run(link, capture_output=True, text=True, check=False).stderr
    folders = [*re.findall(r'"?-L([^"\s]+)', told), Path(nvcc).resolve().parent.parent / "lib"]
    found = next((path for folder in folders if (path := Path(folder, "libcudart_static.a")).is_file()), None)
    if found is None:
        raise BuildError(f"no libcudart_static.a in {', '.join(map(str, folders))}: the CUDA toolkit is incomplete")
    return found.resolve()


def gencode(archs: Sequence[str], *, ptx: bool) -> tuple[str, ...]:
    """nvcc's flags for machine code of these architectures and, if asked, the PTX that the oldest and the newest are
    made from: for Jetson (sm_87), which runs no other's machine code, and for what comes later (sm_110, say)."""
    codes: dict[str, list[str]] = {}
    for arch in archs:
        codes.setdefault(PTX_OF.get(arch, arch), []).append(f"sm_{arch}")
    if ptx:
        for arch in {PTX_OF.get(end, end) for end in (min(archs, key=_arch_number), max(archs, key=_arch_number))}:
            codes[arch].append(f"compute_{arch}")
    return tuple(
        flag for arch, made in codes.items() for flag in ("-gencode", f"arch=compute_{arch},code=[{','.join(made)}]")
    )


def arch_of(source: Path) -> str | None:
    """``"90a"`` for sm90.cu, name_sm90.cu and name_sm90a.cu: instructions of sm_90a exist there alone. None for any
    other name, name_sm80.cu too: what is written for sm_80 runs on all that came after."""
    found = re.search(r"(?:^|_)sm(\d+)a?$", source.stem)
    return next((arch for arch in ALL_ARCHS if found and arch == f"{found[1]}a"), None)


def parse_archs(text: str) -> tuple[str, ...]:
    """``"80,90a"`` or ``"80 90a"`` as architecture names.

    Raises:
        BuildError: one is not a name nvcc could know.
    """
    archs = tuple(re.split(r"[,\s]+", text.strip().replace("sm_", "")))
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            raise BuildError(f"{arch!r} is not a CUDA architecture; name some of {', '.join(ALL_ARCHS)}")
    return archs


def _arch_number(arch: str) -> int:
    return int(arch.rstrip("af"))


@cache
def _version_text(compiler: tuple[str, ...]) -> str:
    return subprocess.run((*compiler, "--version"), capture_output=True, text=True, check=False).stdout
