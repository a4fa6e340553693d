"""What the workflows write beside a checkpoint, and how large one is."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.model_dir import ModelDir


def state_dir(out: Path) -> Path:
    """``OUT.state``: where a run that writes ``OUT`` keeps what it has finished, until the checkpoint is complete."""
    return out.with_name(out.name + ".state")


def weight_bytes(directory: Path) -> int:
    """Size of a model directory's weight files, in bytes."""
    return sum(file.stat().st_size for file in ModelDir(directory).files)
