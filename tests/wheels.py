"""Building packages in tests: in a process of its own, without CUDA, as pip does it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDERS = ("trirun_cli", "kernels", "gptq", "configs", "scripts", "tests", ".ci")
CHECKOUT = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", *FOLDERS)


def in_isolation(code: str, cwd: Path, *paths: Path, **environment: str) -> str:
    """Standard output of a fresh interpreter in ``cwd`` (which it puts on sys.path, as ``python -c`` does).

    It sees the installed packages, but no trirun that may be installed beside them: editable installs hook in through
    .pth files, which -S leaves unread.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRIRUN"))}
    places = map(str, (*paths, sysconfig.get_path("purelib")))
    clean |= {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def call_backend(hook: str, checkout: Path, out: Path) -> Path:
    """The file a build hook makes, without CUDA, in a process of its own as pip runs it."""
    code = f"import trirun_build; print(trirun_build.{hook}({str(out)!r}))"
    made = in_isolation(code, checkout, checkout / "scripts", TRIRUN_CUDA="0").splitlines()[-1]
    return out / made
