"""Decode attention without a GPU: its CUDA source compiled for the host, where CTAs are fibers (on_host/fibers.h)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.kernels.host_sources import HERE, SOURCES, compile_for_host, for_host, needs_tools


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
    for file in HERE.glob("*.cuh"):
        shutil.copy(file, common)
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
    compile_for_host(HERE / "attention.cpp", program)
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
