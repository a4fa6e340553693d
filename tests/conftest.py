"""What every test may ask for: the checkout, the demo model, and reference data beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model that ships with trirun: 8.4 M parameters, with calibration.txt and valid.txt beside it."""
    return ROOT / "configs" / "demo-model"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared of larger models and texts; a test that asks for it is skipped where there is none."""
    folder = ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("no reference models in ../shared")
    return folder
