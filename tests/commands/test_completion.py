"""What TAB offers in the shells, as typer asks for it there."""

import os
import subprocess
import sys
from types import ModuleType

import pytest

PROGRAM = "import sys; sys.argv[0] = 'trirun'; from trirun_cli.__main__ import main; main()"


def asked(shell, line):
    """What a shell puts into the environment before it starts the program."""
    words = ["trirun", *line.split(" ")]
    return {"_TRIRUN_COMPLETE": f"complete_{shell}"} | {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
        "fish": {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("quantize MODEL --preset ", {"fast", "default", "best"}),
        ("quantize MODEL --grid ter", {"ternary"}),
        ("finetune MODEL --method ", {"learned", "trilm", "bitnet"}),
        ("generate DIR --device ", {"auto", "cpu", "cuda"}),
        ("generate DIR --dtype bf", {"bfloat16"}),
        ("serve DIR --kv-cache-dtype ", {"auto", "int8"}),
        ("chat DIR --engine n", {"native"}),
        ("eval DIR --tasks perplexity,pi", {"perplexity,piqa"}),
        ("bench model --shape llama-2", {"llama-2-7b"}),
    ],
)
def test_choices_complete(trirun, monkeypatch, shell, line, names):
    for name, value in asked(shell, line).items():
        monkeypatch.setenv(name, value)
    # Of a program that is a package, as pytest is, another variable would be asked for.
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    _, found, _ = trirun()
    assert all(name in found for name in names)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_program_that_a_shell_starts_completes(shell):
    environment = os.environ | asked(shell, "quantize MODEL --grid ter") | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "ternary" in done.stdout


def test_every_option_with_a_choice_completes():
    import typer

    from trirun_cli.commands.app import app

    commands = typer.main.get_command(app).commands
    commands = {**commands, **{f"bench {name}": each for name, each in commands["bench"].commands.items()}}
    choices = {"--preset", "--grid", "--method", "--device", "--dtype", "--engine", "--kv-cache-dtype", "--accumulate"}
    choices |= {"--act-bits", "--group-size", "--init", "--precision", "--tasks"}
    lacking = [
        (name, option)
        for name, command in commands.items()
        for each in command.params
        for option in set(each.opts) & choices
        if getattr(each, "_custom_shell_complete", None) is None
    ]
    assert lacking == []
