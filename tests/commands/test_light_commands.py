"""Commands that must not wait for torch, and the machine's diagnosis."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.rich_utils

from trirun_cli import __version__
from trirun_cli.commands.app import app
from trirun_cli.commands.bench import measuring

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments):
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trirun_cli", *arguments], cwd=ROOT, capture_output=True
    )


@pytest.mark.parametrize("arguments", [("--help",), ("version",), ("quantize", "--help"), ("generate", "--help")])
def test_nothing_heavy_is_imported(arguments):
    done = start(*arguments)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.decode().splitlines()}
    heavy = {"torch", "transformers", "safetensors", "datasets", "numpy", "yaml"}
    assert not heavy & {name.split(".")[0] for name in imported}


def test_help_and_version_start_fast():
    def processor_time():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    best = 9.0
    for _ in range(5):
        before = processor_time()
        subprocess.run([sys.executable, "-m", "trirun_cli", "version"], cwd=ROOT, capture_output=True, check=True)
        best = min(best, processor_time() - before)
    # 0.3 s on an idle machine, where it is the time that passes; twice that where caches and cores are shared.
    assert best < 0.6


def commands(group, path=()):
    for name, command in group.commands.items():
        yield (*path, name), command
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else ()


HELP = {" ".join(path): command.help for path, command in commands(typer.main.get_command(app))}


@pytest.mark.parametrize("name", HELP)
def test_help_fits_80_columns_with_every_example_on_a_line_of_its_own(trirun, monkeypatch, name):
    monkeypatch.setattr(typer.rich_utils, "MAX_WIDTH", 80)
    code, out, _ = trirun(*name.split(), "--help")
    lines = [line.strip() for line in out.splitlines()]
    examples = [line.strip() for line in HELP[name].splitlines() if line.startswith(("  ", "Example: "))]
    assert code == 0 and examples and set(examples) <= set(lines) and max(map(len, lines)) <= 80
    # A name that does not fit is cut with an ellipsis. A flag has no value, whose type could be shown.
    assert "…" not in out and "<bool>" not in out


WAITING = """
import os, sys
os.getloadavg = lambda: (99.0, 0.0, 0.0)
from trirun_cli.commands.app import main
import trirun_cli.commands.{0} as module
let = module.let_threads_sleep
def checked():
    assert "torch" not in sys.modules
    let()
    print(os.environ.get("OMP_WAIT_POLICY"))
    sys.exit(3)
module.let_threads_sleep = checked
sys.argv = ["trirun", {1}]
main()
"""


@pytest.mark.parametrize("given", [None, "active"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("quantize", "'quantize', '/none'"),
        ("finetune", "'finetune', '/none'"),
        ("eval", "'eval', '-c', '/none'"),
        ("bench.measuring", "'bench'"),
        ("bench.measuring", "'bench', 'model', '--shape', 'tiny'"),
        ("bench.measuring", "'bench', 'f16acc'"),
    ],
)
def test_torch_is_told_how_its_threads_wait_before_it_is_imported(module, arguments, given):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"OMP_WAIT_POLICY": given} if given else {})
    code = WAITING.format(module, arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 3 and done.stdout == f"{given or 'passive'}\n", done.stderr


@pytest.mark.parametrize(("load", "policy"), [(0.0, None), (99.0, "passive")])
def test_torch_waits_in_its_own_way_where_it_is_timed_alone(monkeypatch, load, policy):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert (measuring.sleep_if_busy() is None) == (policy is None)
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_version_as_an_option(trirun):
    code, out, _ = trirun("--version")
    assert code == 0 and out == f"trirun {__version__}\n"


def test_version_as_json(trirun):
    code, out, _ = trirun("version", "--json")
    assert code == 0 and json.loads(out)["schema"] == "trirun.version/1" and json.loads(out)["trirun"]


def test_doctor_runs_every_check(trirun):
    code, out, _ = trirun("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert {"machine", "torch", "transformers", "CPU kernel", "CUDA kernel", "int2_gemm on cpu"} <= set(findings)
    assert findings["int2_gemm on cpu"]["status"] == "ok"
    assert code == (0 if json.loads(out)["ok"] else 6)


def test_inspect_adds_up(trirun, packed):
    code, out, _ = trirun("inspect", packed, "--json")
    document = json.loads(out)
    assert code == 0 and len(document["modules"]) == 14
    assert document["packed_weights"] == sum(module["n"] * module["k"] for module in document["modules"])
    for module in document["modules"]:
        assert sum(module["code_shares"]) == pytest.approx(1, abs=1e-3) and module["code_shares"][3] == 0
    assert document["packed_bytes"] + document["other_bytes"] == (packed / "model.safetensors").stat().st_size


def test_an_interrupt_while_it_starts_is_an_interrupt():
    program = """
import sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from trirun_cli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert done.returncode == 130 and done.stderr == b""


def commands():
    """Every command as its words."""
    from typer.main import get_command

    from trirun_cli.commands.app import app

    for name, command in get_command(app).commands.items():
        yield (name,)
        yield from ((name, below) for below in getattr(command, "commands", ()))


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_help_has_an_example_and_json_and_fits_the_terminal(trirun, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = trirun(*words, "--help")
    assert code == 0 and "Example" in out and f"trirun {' '.join(words)}" in out and "--json" in out
    assert max(map(len, out.splitlines())) <= 80
