"""libtrirun_cuda.so's host code on GPUs that are only described (described_devices.cpp): which launches it makes on
each, and whether such a GPU would take them."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trirun_compile import Tree, compiler_logs
from trirun_kernels.native import DTYPES, Int2Struct, PlanStruct, with_signatures
from trirun_kernels.plan.problem import Device, Plan
from trirun_spills import Usage, parse_usage
from trirun_toolchain import find_nvcc

MEMORY = 1 << 44  # where pointers point that nothing follows


@dataclass(frozen=True, slots=True)
class Gpu:
    """``code``: the architecture whose machine code, or a translation of whose PTX, it runs. ``shared``: KiB of a CTA
    at most (CUDA programming guide, technical specifications per compute capability)."""

    name: str
    arch: int
    code: str
    ptx: int
    sms: int
    shared: int

    @property
    def device(self) -> Device:
        return Device(self.arch, self.sms)

    def __str__(self) -> str:
        return self.name


GPUS = (
    Gpu("A100", 80, "80", 80, 108, 163),
    Gpu("Orin", 87, "80", 80, 16, 163),
    Gpu("RTX-3090", 86, "86", 80, 82, 99),
    Gpu("RTX-4090", 89, "89", 80, 128, 99),
    Gpu("RTX-4060", 89, "89", 80, 24, 99),
    Gpu("H200", 90, "90a", 90, 132, 227),
    Gpu("H100-PCIe", 90, "90a", 90, 114, 227),
    Gpu("H100-1g", 90, "90a", 90, 16, 227),
    Gpu("B200", 100, "100", 100, 148, 227),
    Gpu("B300", 103, "100", 100, 148, 227),
    Gpu("Thor", 110, "100", 100, 20, 227),
    Gpu("RTX-5090", 120, "120", 100, 170, 99),
    Gpu("GB10", 121, "120", 100, 48, 99),
)


def built_archs() -> set[str]:
    """Architectures of the CUDA library in this tree; none where it, its objects or a compiler are missing."""
    tree = Tree()
    report = tree.report("cuda")
    there = report and all((tree.objects / name).exists() for name in report["objects"].values())
    return set(report["archs"]) if there and find_nvcc() else set()


@cache
def kernels() -> list[Usage]:
    """What every kernel takes on every architecture, as ptxas reported it."""
    return [usage for log in compiler_logs(Tree(), "cuda").values() for usage in parse_usage(log)]


def link(folder: Path) -> ctypes.CDLL:
    """The library's own objects, with described devices in the place of CUDA's runtime."""
    tree, path = Tree(), folder / "libtrirun_described.so"
    objects = [str(tree.objects / name) for name in tree.report("cuda")["objects"].values()]
    source = str(Path(__file__).with_suffix(".cpp"))
    command = [str(find_nvcc()), "-std=c++17", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    subprocess.run([*command, source, *objects, "-o", str(path)], check=True, capture_output=True, text=True)
    linked = with_signatures(ctypes.CDLL(str(path)))
    linked.described_complaint.restype = linked.described_launch.restype = ctypes.c_char_p
    return linked


def describe(linked: ctypes.CDLL, gpu: Gpu) -> None:
    """The device from here on."""
    linked.described_device(gpu.arch, gpu.ptx, gpu.sms, gpu.shared * 1024)
    for usage in kernels():
        if usage.arch == gpu.code:
            linked.described_kernel(usage.symbol.encode(), usage.registers, usage.shared)
    linked.described_clear()


def launched(linked: ctypes.CDLL) -> list[str]:
    """Symbols of the kernels launched since :func:`describe`."""
    return [linked.described_launch(i).decode() for i in range(linked.described_launches())]


def product(
    linked: ctypes.CDLL,
    shape: tuple[int, int],
    m: int,
    group_size: int,
    act_bits: int,
    plan: Plan,
    *,
    dtype: str = "float16",
    zeros: bool = False,
    quantized: bool = False,
    odd: bool = False,
) -> str:
    """What the library or the device objects to in one product; empty where nothing. ``odd``: of a row of x more than k
    columns lie in memory, an odd number of them."""
    n, k = shape
    w = Int2Struct(MEMORY, 2 * MEMORY, 3 * MEMORY if zeros else None, n, k, group_size, 1.0)
    plan_struct, element = PlanStruct(*plan), DTYPES[dtype]
    size = linked.trirun_cuda_int2_workspace(ctypes.byref(w), m, element, act_bits, ctypes.byref(plan_struct))
    rest = (act_bits, ctypes.byref(plan_struct), 4 * MEMORY if size else None, size, None)
    linked.described_clear()
    if quantized:
        code = linked.trirun_cuda_int2_gemm_quantized(
            ctypes.byref(w), n, 5 * MEMORY, m, None, 6 * MEMORY, element, n, *rest
        )
    else:
        code = linked.trirun_cuda_int2_gemm(
            ctypes.byref(w), n, k, 5 * MEMORY, element, m, k + odd, None, 6 * MEMORY, n, *rest
        )
    complaint = linked.described_complaint().decode()
    return f"{linked.trirun_cuda_error(code).decode()}: {complaint}" if code or complaint else ""
