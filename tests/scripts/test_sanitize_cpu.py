"""The CPU library under ASan and UBSan: the part of scripts/sanitize_cpu.py that every change can afford."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from sanitize_cpu import RUNTIME
from trirun_toolchain import cxx_compiler


def has_sanitizers() -> bool:
    asked = [
        subprocess.run([*cxx_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        for name in RUNTIME["address"]
    ]
    return all(Path(found.stdout.strip()).is_absolute() for found in asked)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not has_sanitizers(), reason="g++ without its sanitizers")
def test_wrong_calls_and_a_step_are_clean_under_asan_and_ubsan(repo_root: Path) -> None:
    """About 30 s of processor time, 16 of them the compiler's."""
    if not (repo_root / ".git").exists():
        pytest.skip("not a git checkout")
    command = [sys.executable, "scripts/sanitize_cpu.py", "address", "--quick"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '"calls": 2000' in done.stdout and " passed" in done.stdout
