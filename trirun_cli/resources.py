"""Files that ship with trirun, found in a wheel and in a checkout alike."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """The folder of recipes, benchmark shapes and the demo model."""
    installed = _HERE / "_data" / "configs"
    return installed if installed.is_dir() else _HERE.parent / "configs"
