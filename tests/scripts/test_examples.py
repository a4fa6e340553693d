"""Every example runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def example(repo_root: Path):
    """Run an example: ``example(name, *arguments)`` → what it prints."""

    def run(name: str, *arguments: object) -> str:
        places = [repo_root / "kernels", repo_root / "gptq", repo_root]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, repo_root / "scripts" / "examples" / name, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_quantize_and_chat(example, save_llama, tmp_path):
    out = example("quantize_and_chat.py", save_llama(intermediate_size=256), tmp_path / "Q")
    assert (tmp_path / "Q" / "config.json").exists()
    assert "bits per weight" in out and "perplexity" in out
    assert out.count("length") == 2 and "native decoder on cpu" in out and "answers: " in out


@pytest.mark.slow
def test_serve_and_call(example, packed):
    pytest.importorskip("openai")
    out = example("serve_and_call.py", packed)
    assert "checkpoint: " in out and "16 tokens" in out
    assert "8 answers at once, 8 different ones" in out


def test_evaluate(example, packed, ternary_model):
    lines = example("evaluate.py", packed, ternary_model).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["model", "checkpoint"]
    assert float(lines[-1].split()[1]) == pytest.approx(1, abs=0.002)


def test_load_in_transformers(example, packed):
    out = example("load_in_transformers.py", packed)
    assert "Int2Linear" in out and "The old house stood" in out


def test_no_example_is_left_out(repo_root: Path):
    examples = {path.name for path in (repo_root / "scripts" / "examples").glob("*.py")}
    tested = Path(__file__).read_text()
    assert examples and not {name for name in examples if f'"{name}"' not in tested}
