"""CUDA sources as the host's compiler takes them, where threads are fibers (on_host/fibers.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from trirun_toolchain import find_nvcc

HERE = Path(__file__).with_name("on_host")
SOURCES = Path(__file__).parents[2] / "kernels" / "csrc"
SHARED = re.compile(r"(?<!extern )__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+([^;]+);")
NAMES = re.compile(r"(\w+)((?:\[[^\]]*\])*)(?:,\s*|$)")
# longjmp takes another fiber's stack for a mistake where sources are fortified.
HOST_FLAGS = "-w,-U_FORTIFY_SOURCE"

needs_tools = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")


def for_host(text: str) -> str:
    """A kernel's source with what the host's compiler does not know replaced."""

    def variables(match: re.Match[str]) -> str:
        kind, at = match[1], match.start()
        return " ".join(
            f"auto& {name} = on_host::shared<{kind}{sizes}, {at + i}>();"
            for i, (name, sizes) in enumerate(NAMES.findall(match[2]))
        )

    text = re.sub(r"extern __shared__[^;]*\bmemory\[\];", "uint8_t* memory = on_host::memory();", text)
    text = SHARED.sub(variables, text)
    text = text.replace("#if __CUDA_ARCH__ >= 900", "#if 1").replace("__grid_constant__", "")
    return text.replace("__global__", "static")


def compile_for_host(source: Path, made: Path, *flags: str) -> None:
    """A program or a library of a .cpp file, of which nvcc makes what the host's compiler makes of it with CUDA's
    headers; files are included from ``made``'s folder first."""
    command = [str(find_nvcc()), "-std=c++20", "-O1", "-Xcompiler", HOST_FLAGS, *flags]
    includes = [f"-I{place}" for place in (made.parent, HERE, SOURCES)]
    subprocess.run([*command, *includes, str(source), "-o", str(made)], check=True, capture_output=True, text=True)


def lay_out(folder: Path) -> Path:
    """Kernels' sources for the host; their folder."""
    made = Path(shutil.copytree(SOURCES / "cuda", folder / "cuda"))
    for part in ("step", "decoder", "head", "gemm_decode"):
        for file in (made / part).iterdir():
            file.write_text(for_host(file.read_text()))
    for file in HERE.glob("*.cuh"):
        shutil.copy(file, made / "common")
    return made


def host_library(folder: Path, source: str, room: int, *changes: tuple[str, str]) -> ctypes.CDLL:
    """A library of a source file of csrc/cuda with its C functions, for the host.

    Args:
        folder: an empty one, for what is compiled. source: such as ``step/step_sm90.cu``.
        room: bytes of shared memory of a CTA.
        changes: to that file, what is there and what takes its place.
    """
    sources = lay_out(folder)
    sizes = sources / "kernels.cuh"
    sizes.write_text(sizes.read_text().replace("MAX_SHARED = 227 * 1024", f"MAX_SHARED = {room}"))
    at = sources / source
    text = at.read_text()
    for there, instead in changes:
        assert there in text
        text = text.replace(there, instead)
    at.write_text(text)
    at, made = at.rename(at.with_suffix(".cpp")), folder / "library.so"
    compile_for_host(at, made, "-shared", "-Xcompiler", "-fPIC")
    return ctypes.CDLL(str(made))
