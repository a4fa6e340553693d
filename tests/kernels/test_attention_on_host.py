"""Decode attention without a GPU: its CUDA source compiled for the host, where CTAs are fibers (on_host/fibers.h)."""

from __future__ import annotations

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

needs_tools = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")


def for_host(text: str) -> str:
    """A kernel's source with what the host's compiler does not know replaced: shared memory, and launches."""

    def variables(match: re.Match[str]) -> str:
        kind, at = match[1], match.start()
        return " ".join(
            f"auto& {name} = on_host::shared<{kind}{sizes}, {at + i}>();"
            for i, (name, sizes) in enumerate(NAMES.findall(match[2]))
        )

    text = re.sub(r"extern __shared__[^;]*\bmemory\[\];", "uint8_t* memory = on_host::memory();", text)
    text = SHARED.sub(variables, text)
    text = text.replace("#if __CUDA_ARCH__ >= 900", "#if 1").replace("__grid_constant__", "")
    text = text.replace(
        '#include "cuda/common/launch.cuh"', '#include "fibers.h"\nnamespace trirun { struct DeviceFacts; }'
    )
    launch = re.search(r"// Every kernel launched this way.*?\n}\n", text, re.S)
    return text.replace("__global__", "static").replace(launch[0] if launch else "\0", "")


def built(folder: Path, *, near_tiles: int, change: tuple[str, str] | None = None) -> Path:
    """The program.

    Args:
        near_tiles: of a warp, up to which one cluster does a row by itself.
        change: to the grouped kernel's source, what is there and what takes its place.
    """
    common, decoder = folder / "cuda" / "common", folder / "cuda" / "decoder"
    for place in (common, decoder):
        place.mkdir(parents=True)
    for file in ("elements.cuh", "activations.cuh"):
        shutil.copy(SOURCES / "cuda" / "common" / file, common)
    for file in ("ptx.cuh", "hopper.cuh"):
        shutil.copy(HERE / file, common)
    for name in ("attention", "attention_16bit", "attention_grouped", "heads", "limbs", "launch"):
        text = (SOURCES / "cuda" / "decoder" / f"{name}.cuh").read_text()
        if name == "attention":
            text, count = re.subn(r"NEAR_TILES = \d+", f"NEAR_TILES = {near_tiles}", text)
            assert count == 1
        if name == "attention_grouped" and change is not None:
            assert text.count(change[0]) == 1
            text = text.replace(*change)
        (decoder / f"{name}.cuh").write_text(for_host(text))
    program = folder / "attention"
    # Of a .cpp file nvcc makes what the host's compiler makes of it with CUDA's headers.
    command = [
        str(find_nvcc()),
        "-std=c++20",
        "-O1",
        "-Xcompiler",
        "-w,-U_FORTIFY_SOURCE",  # its longjmp takes another fiber's stack for a mistake
        *(f"-I{place}" for place in (folder, HERE, SOURCES)),
    ]
    subprocess.run(
        [*command, str(HERE / "attention.cpp"), "-o", str(program)], check=True, capture_output=True, text=True
    )
    return program


@needs_tools
def test_one_cluster_and_several(tmp_path):
    # With one tile to a warp several clusters share a long row, and meet in the workspace.
    done = subprocess.run([built(tmp_path, near_tiles=1)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@needs_tools
def test_a_barrier_less_is_found(tmp_path):
    program = built(tmp_path, near_tiles=4, change=("__syncwarp();  // other lanes have copied too", ";"))
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 1 and "error inf" in done.stdout
