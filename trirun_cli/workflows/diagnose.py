"""The checks behind ``trirun doctor``."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# What this version was tested with: the lower bound included, the upper excluded.
TESTED = {"torch": ("2.10", "3"), "transformers": ("5.16.1", "6")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. ``status``: "ok", "note" (works, but worth knowing) or "fail"."""

    name: str
    status: str
    detail: str


def diagnose() -> Iterator[Finding]:
    """Every finding, cheap ones first; the self-tests of the kernels last."""
    yield _guarded("machine", _machine)
    for package, (low, high) in TESTED.items():
        yield _version(package, low, high)
    yield _guarded("name `kernels`", _kernels_package)
    yield _guarded("CPU kernel", _cpu_library)
    yield _guarded("CUDA kernel", _cuda)
    yield _guarded("int2_gemm on cpu", lambda: self_test("cpu"))
    if _cuda_devices():
        yield _guarded("int2_gemm on cuda", lambda: self_test("cuda"))
        yield _guarded("fp16 sums", _fp16_sums)


def self_test(device: str) -> Finding:
    """int2_gemm against its reference on random data: every kind of grid, 8- and 16-bit activations, and as many
    rows as different kernels take."""
    import torch
    from trirun_kernels import QuantSpec, pack
    from trirun_kernels.gemm import reference
    from trirun_kernels.gemm.ops import int2_gemm

    generator, (n, k) = torch.Generator().manual_seed(0), (320, 1024)
    dtypes = (torch.float32,) if device == "cpu" else (torch.float16, torch.float32)
    worst, products = (0.0, ""), 0
    for spec in (QuantSpec(-1, 1.0), QuantSpec(128, 1.5), QuantSpec(64, 1.0), QuantSpec(32, 1.0), QuantSpec(128, None)):
        codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
        scales, zeros = (torch.rand(n, spec.groups(k), generator=generator).half() + 0.5 for _ in range(2))
        w = pack(codes, scales, spec, zeros if spec.zero is None else None).to(device)
        for m in (1, 7, 20, 100):
            x = torch.randn(m, k, generator=generator).to(device)
            for act_bits in (8, 16):
                for dtype in dtypes:
                    want = reference.int2_gemm(x.to(dtype), w, act_bits=act_bits).float()
                    error = (int2_gemm(x.to(dtype), w, act_bits=act_bits).float() - want).norm() / want.norm()
                    case = f"{spec}, {m} rows of {str(dtype)[6:]}, {act_bits}-bit activations"
                    worst, products = max(worst, (error.nan_to_num(torch.inf).item(), case)), products + 1
    # Both round to fp16; a value on the border between two int8 codes may fall either way.
    right = worst[0] < 2e-3
    detail = f"{products} products, relative error at most {worst[0]:.1e} against the reference"
    return Finding(f"int2_gemm on {device}", "ok" if right else "fail", detail if right else f"{detail}: {worst[1]}")


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = shutil.disk_usage(Path.cwd()).free / 1024**3
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return Finding("machine", "ok", f"{system}, {cores} cores, {memory:.1f} GiB memory, {free:.0f} GiB disk free")


def _version(package: str, low: str, high: str) -> Finding:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Finding(package, "fail", "not installed")
    inside = _numbers(low) <= _numbers(version) < _numbers(high)
    return Finding(package, "ok" if inside else "note", f"{version} (tested: {low} up to, not including, {high})")


def _kernels_package() -> Finding:
    # A folder named `kernels` with an __init__.py shadows the package that transformers imports under that name.
    spec = importlib.util.find_spec("kernels")
    if spec is None or spec.origin is None:
        return Finding("name `kernels`", "ok", "no package shadows it")
    try:
        return Finding("name `kernels`", "ok", f"Hugging Face kernels {metadata.version('kernels')}")
    except metadata.PackageNotFoundError:
        return Finding("name `kernels`", "fail", f"{spec.origin} shadows a name that transformers imports; remove it")


def _cpu_library() -> Finding:
    from trirun_kernels.gemm import cpu

    backend = cpu.backend()
    if backend == "reference":
        return Finding("CPU kernel", "fail", "not built, a dense reference serves: reinstall with a C++ compiler")
    return Finding("CPU kernel", "ok", f"instruction set {backend}")


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cuda() -> Finding:
    import torch
    from trirun_kernels import native

    built = native.library_path("cuda").exists()
    library = "built" if built else "not built"
    if not _cuda_devices():
        return Finding("CUDA kernel", "note", f"torch {torch.__version__} sees no CUDA device; library {library}")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(_cuda_devices()))
    if not built:
        return Finding("CUDA kernel", "fail", f"{names}, but the library is not built: reinstall with nvcc on PATH")
    return _guarded("CUDA kernel", lambda: Finding("CUDA kernel", "ok", f"{names}; {native.load('cuda')._name}"))


def _fp16_sums() -> Finding:
    """Whether fp16 accumulation pays, and whether it is as accurate here as its reference."""
    import torch

    from ..backends.accumulation import measure

    facts = measure(torch.device("cuda"))
    accuracy = f"relative error {facts.error:.1e}, the reference's {facts.reference_error:.1e}"
    pays = f"{facts.gain:g} times the rate of fp32 sums" if facts.gain > 1 else "no gain, fp32 sums are as fast here"
    return Finding("fp16 sums", "ok" if facts.accurate else "fail", f"{pays}; {accuracy}")


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    # A diagnosis must survive whatever it diagnoses.
    try:
        return check()
    except Exception as error:
        return Finding(name, "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in parts[:3])
