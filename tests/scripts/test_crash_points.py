"""Runs that are killed, or whose disk fails, at some of the calls that change files; scripts/crash_points.py tries them
all."""

import shutil
import subprocess
import sys

import pytest

SCRIPT = "scripts/crash_points.py"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_pack_leaves_the_old_or_the_new_checkpoint(repo_root, ternary_model):
    options = ["--model", ternary_model, "--errors", "KILL,TWO,ENOSPC,EIO", "--stride", "17"]
    command = [sys.executable, SCRIPT, "pack", *options]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("; 0 faults") == 2 and "no points" not in done.stdout
