"""Runs that are killed, or whose disk fails, at some of the calls that change files; scripts/crash_points.py tries them
all."""

import shutil
import subprocess
import sys

import pytest

SCRIPT = "scripts/crash_points.py"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
@pytest.mark.parametrize("errors", ["KILL", "ENOSPC,EROFS,EIO"])
def test_pack_leaves_the_old_or_the_new_checkpoint(repo_root, ternary_model, errors):
    stride = "4" if errors == "KILL" else "10"
    command = [sys.executable, SCRIPT, "pack", "--model", ternary_model, "--errors", errors, "--stride", stride]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("; 0 faults") == 2 and "no points" not in done.stdout
