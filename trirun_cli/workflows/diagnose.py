"""The checks behind ``trirun doctor``."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..errors import TrirunError
from ..integrations.vllm_server import TESTED as TESTED_VLLM
from ..integrations.vllm_server import check_installation, installed_version

# What this version was tested with: the lower bound included, the upper excluded.
TESTED = {"torch": ("2.10", "3"), "transformers": ("5.23", "6")}

LIGHT = "packed Llama-like checkpoints run on the CPU without it; pip install trirun adds it"


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
    yield _guarded("vllm", _vllm)
    yield _guarded("name `kernels`", _kernels_package)
    yield _guarded("CPU kernel", _cpu_library)
    if find_spec("torch") is None:
        yield _guarded("int2_gemm on cpu", self_test_without_torch)
        return
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


def self_test_without_torch() -> Finding:
    """The CPU's product on random codes against a product in float64, by numpy: every kind of grid, 8- and 16-bit
    activations."""
    from ctypes import byref

    import numpy as np
    from trirun_kernels import QuantSpec, native
    from trirun_kernels.arrays import Array
    from trirun_kernels.weights.numpy_codes import unpack
    from trirun_kernels.weights.shapes import stored_shapes

    random, (n, k) = np.random.default_rng(0), (320, 1024)
    worst, products = (0.0, ""), 0
    for spec in (QuantSpec(-1, 1.0), QuantSpec(128, 1.5), QuantSpec(64, 1.0), QuantSpec(32, 1.0), QuantSpec(128, None)):
        words_shape, groups_shape = stored_shapes(n, k, spec)
        # Any bits are codes.
        words = random.integers(-(2**31), 2**31, words_shape, dtype=np.int32)
        scales, zeros = ((random.random(groups_shape) + 0.5).astype(np.float16) for _ in range(2))
        stored = zeros if spec.zero is None else None
        dense = unpack(words, scales, stored, n, k, spec).dense().astype(np.float64)
        places = [None if part is None else Array.of(part).address for part in (words, scales, stored)]
        weight = native.Int2Struct(*places, n, k, spec.group_size, spec.zero_operand)
        for m in (1, 7, 20, 100):
            x = random.standard_normal((m, k), dtype=np.float32)
            step = np.abs(x).max(axis=1, keepdims=True) / 127
            for act_bits, inputs in ((16, x), (8, np.rint(x / step) * step)):
                y = np.empty((m, n), np.float32)
                code = native.cpu().trirun_cpu_int2_gemm(
                    byref(weight), n, k, Array.of(x).address, native.DTYPES["float32"], m, k, None,
                    Array.of(y).address, n, act_bits, 1,
                )  # fmt: skip
                native.check_cpu(code, f"trirun_cpu_int2_gemm: x [{m}, {k}], weight [{n}, {k}]")
                want = inputs.astype(np.float64) @ dense.T
                error = float(np.linalg.norm(y - want) / np.linalg.norm(want))
                case = f"{spec}, {m} rows, {act_bits}-bit activations"
                worst, products = max(worst, (error if error == error else np.inf, case)), products + 1
    right = worst[0] < 2e-3
    detail = f"{products} products, relative error at most {worst[0]:.1e} against float64"
    return Finding("int2_gemm on cpu", "ok" if right else "fail", detail if right else f"{detail}: {worst[1]}")


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
        return Finding(package, "note", f"not installed: {LIGHT}")
    inside = _numbers(low) <= _numbers(version) < _numbers(high)
    return Finding(package, "ok" if inside else "note", f"{version} (tested: {low} up to, not including, {high})")


def _kernels_package() -> Finding:
    # A folder named `kernels` with an __init__.py shadows the package that transformers imports under that name.
    spec = find_spec("kernels")
    if spec is None or spec.origin is None:
        return Finding("name `kernels`", "ok", "no package shadows it")
    try:
        return Finding("name `kernels`", "ok", f"Hugging Face kernels {metadata.version('kernels')}")
    except metadata.PackageNotFoundError:
        return Finding("name `kernels`", "fail", f"{spec.origin} shadows a name that transformers imports; remove it")


def _vllm() -> Finding:
    """vLLM, which ``trirun serve --backend vllm`` starts."""
    version = installed_version()
    if version is None:
        return Finding("vllm", "note", "not installed; for trirun serve --backend vllm: pip install 'trirun[vllm]'")
    try:
        check_installation()
    except TrirunError as error:
        return Finding("vllm", "note", f"{error}: {error.fix}")
    return Finding("vllm", "ok", f"{version} with trirun's plugin (tested: {TESTED_VLLM})")


def _cpu_library() -> Finding:
    from trirun_kernels import native

    if not native.library_path("cpu").exists():
        return Finding("CPU kernel", "fail", "not built, a dense reference serves: reinstall with a C++ compiler")
    return Finding("CPU kernel", "ok", f"instruction set {native.cpu().trirun_cpu_isa().decode()}")


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
