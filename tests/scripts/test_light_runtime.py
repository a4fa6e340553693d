"""The light runtime: the wheel in a fresh environment without torch, transformers and datasets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "datasets", "safetensors", "accelerate"}


def requirements(repo_root: Path) -> list[str]:
    lines = (repo_root / "scripts" / "requirements-runtime.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRIRUN", "OMP"))}
    return kept | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def test_the_requirements_are_pinned_and_agree_with_the_project(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    bounds = {re.split(r"[<>=]", entry)[0]: entry for entry in project["dependencies"]}
    pinned = {line.split("==")[0] for line in (repo_root / "scripts" / "constraints.txt").read_text().splitlines()}
    for line in requirements(repo_root):
        name = re.split(r"[<>=]", line)[0]
        assert name in pinned and name not in HEAVY
        assert bounds.get(name, line) == line
    assert {*project["optional-dependencies"]["serve"]} - {"aiohttp>=3.10"} <= set(requirements(repo_root))


@pytest.fixture(scope="module")
def light(repo_root: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``trirun`` of a fresh environment, installed as scripts/requirements-runtime.txt says."""
    venv = tmp_path_factory.mktemp("light") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python, scripts = venv / "bin" / "python", repo_root / "scripts"

    def pip(*arguments: object) -> subprocess.CompletedProcess[str]:
        # This environment's pip: a copy of its own would take longer to install than all that the light runtime needs.
        command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
        command += map(str, arguments)
        return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)

    probe = pip("--dry-run", "--no-deps", "--retries", "0", "--timeout", "15", "typer")
    if probe.returncode:
        pytest.skip(f"no package index: {probe.stderr.strip()[-200:]}")
    for arguments in (
        ("--no-deps", wheel),
        ("-r", scripts / "requirements-runtime.txt", "-c", scripts / "constraints.txt"),
    ):
        done = pip(*arguments)
        assert done.returncode == 0, done.stderr
    installed = {path.name.partition("-")[0].lower() for path in venv.glob("lib/python*/site-packages/*.dist-info")}
    assert "trirun" in installed and not installed & HEAVY
    return venv / "bin" / "trirun"


def run(light: Path, *arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [light, *map(str, arguments)], cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def chatty(copy_of, packed: Path) -> Path:
    """The packed model with a chat template."""
    directory = copy_of(packed)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.slow
def test_packed_models_run_without_torch(
    light: Path, packed: Path, ternary_model: Path, chatty: Path, tmp_path, trirun
):
    options = ("-p", "The sea", "-n", 8, "--json")
    # The same tokens as with everything installed.
    whole = json.loads(trirun("generate", packed, *options, "--device", "cpu")[1])
    assert json.loads(run(light, "generate", packed, *options, cwd=tmp_path).stdout)["text"] == whole["text"]
    done = subprocess.run(
        [light, "chat", chatty, "-n", "4", "--json"], input="Hello\n", capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and len(json.loads(done.stdout)["messages"]) == 2, done.stderr
    facts = json.loads(run(light, "inspect", packed, "--json", cwd=tmp_path).stdout)
    assert facts == json.loads(trirun("inspect", packed, "--json")[1])
    assert "checks passed" in run(light, "verify", packed, cwd=tmp_path).stdout
    # Comparing takes transformers: it knows by which names a family's files hold its weights.
    compared = run(light, "verify", packed, "--model", ternary_model, cwd=tmp_path, code=4)
    assert "torch, which is not installed" in compared.stderr
    assert "torch not installed" in run(light, "version", cwd=tmp_path).stdout
    findings = {f["name"]: f for f in json.loads(run(light, "doctor", "--json", cwd=tmp_path).stdout)["findings"]}
    assert findings["int2_gemm on cpu"]["status"] == "ok" and findings["torch"]["status"] == "note"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["quantize demo", "pack demo", "finetune demo", "eval demo", "bench", "generate demo -p x", "bench serve -c demo"],
)
def test_what_needs_more_says_what_to_install(light: Path, tmp_path: Path, arguments: str) -> None:
    done = run(light, *arguments.split(), cwd=tmp_path, code=4)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "pip install" in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_a_server_answers_64_clients(light: Path, packed: Path, tmp_path: Path) -> None:
    command = [light, "serve", packed, "--port", "0", "--json", "--max-batch", "64"]
    with subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            document = ""
            for line in server.stdout:
                document += line
                if line.startswith("}"):
                    break
            url = json.loads(document)["url"]

            def ask(number: int) -> tuple[str, int]:
                body = {"prompt": f"The sea {number % 8}", "max_tokens": 16, "temperature": 0}
                request = urllib.request.Request(
                    f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=300) as response:
                    answer = json.load(response)
                return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

            with ThreadPoolExecutor(64) as clients:
                answers = list(clients.map(ask, range(64)))
            # Each of eight prompts has one answer, whatever ran beside it.
            assert all(answers[number] == answers[number % 8] for number in range(64))
            assert all(tokens > 0 for _, tokens in answers)
        finally:
            server.terminate()
    assert server.returncode == 0
