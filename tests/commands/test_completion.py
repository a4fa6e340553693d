"""What TAB offers in the shells, as typer asks for it there."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import sys; sys.argv[0] = 'trirun'; from trirun_cli.__main__ import main; main()"


def offered(shell, line):
    words = ["trirun", *line.split(" ")]
    asked = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
        "fish": {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environment = os.environ | {"_TRIRUN_COMPLETE": f"complete_{shell}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | asked, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stdout


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
def test_choices_complete(shell, line, names):
    found = offered(shell, line)
    assert all(name in found for name in names)


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
