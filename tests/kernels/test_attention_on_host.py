"""Decode attention without a GPU: its CUDA source compiled for the host, where CTAs are fibers (on_host/fibers.h)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.kernels.host_sources import HERE, compile_for_host, lay_out, needs_tools


def built(folder: Path, *, near_tiles: int, change: tuple[str, str] | None = None) -> Path:
    """The program.

    Args:
        near_tiles: of a warp, up to which one cluster does a row by itself.
        change: to the grouped kernel's source, what is there and what takes its place.
    """
    decoder = lay_out(folder) / "decoder"
    attention, grouped = decoder / "attention.cuh", decoder / "attention_grouped.cuh"
    text, count = re.subn(r"NEAR_TILES = \d+", f"NEAR_TILES = {near_tiles}", attention.read_text())
    assert count == 1
    attention.write_text(text)
    if change is not None:
        text = grouped.read_text()
        assert text.count(change[0]) == 1
        grouped.write_text(text.replace(*change))
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
