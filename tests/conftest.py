"""What every test may ask for: the checkout, the demo model, reference data beside the checkout, the command line in
this process, one thread."""

from __future__ import annotations

import sys
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


@pytest.fixture
def trirun(capsys, monkeypatch):
    """Run the command line: ``trirun("pack", path)`` → (exit code, stdout, stderr)."""
    from trirun_cli.app import main

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["trirun", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", stdin)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture(scope="module")
def one_thread():
    """One thread for torch: where matrices are tiny, waiting for a second one on a busy machine is most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
