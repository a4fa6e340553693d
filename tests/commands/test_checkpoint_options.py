"""Every command takes its model and its threads in the same way, and ``demo`` is a model everywhere."""

import json
import os

import pytest
import typer

from trirun_cli.commands.app import app

COMMANDS = typer.main.get_command(app).commands
COMMANDS = {**COMMANDS, **{f"bench {name}": each for name, each in COMMANDS["bench"].commands.items()}}

OF_A_CHECKPOINT = ("generate", "chat", "serve", "eval", "inspect", "verify", "export", "bench model")
COMPUTING = ("quantize", "pack", "finetune", "export", "generate", "chat", "serve", "eval")
COMPUTING += ("bench", "bench kernels", "bench model", "bench f16acc")


def parameters(name):
    return {option: each for each in COMMANDS[name].params for option in each.opts}


@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_a_checkpoint_is_an_argument_and_an_option(name):
    found = parameters(name)
    argument = found["models" if name == "serve" else "checkpoint"]
    assert argument.param_type_name == "argument" and not argument.required
    assert {"--checkpoint", "-c"} == set(found["--checkpoint"].opts)


@pytest.mark.parametrize("name", COMMANDS)
def test_model_is_the_unquantized_one_wherever_it_is_an_option(name):
    option = parameters(name).get("--model")
    assert option is None or (option.help.startswith("The original, unquantized model") and "-m" in option.opts)


@pytest.mark.parametrize("name", COMPUTING)
def test_commands_that_compute_take_threads(name):
    assert "--threads" in parameters(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "/none"),
        ("pack", "/none"),
        ("finetune", "/none"),
        ("generate", "/none"),
        ("chat", "/none"),
        ("serve", "/none"),
        ("eval", "/none"),
        ("bench",),
        ("bench", "model", "/none"),
        ("bench", "f16acc"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("threads", "message"), [("0", "at least 1"), ("99999", "this process may use")])
def test_threads_are_checked(trirun, arguments, threads, message):
    code, out, err = trirun(*arguments, "--threads", threads)
    assert code == 2 and out == "" and f"--threads {threads}: {message}" in err


def test_an_argument_and_an_option_give_the_same(trirun, packed):
    options = ("-p", "The sea", "-n", 4, "--json")
    first = trirun("generate", packed, *options)
    assert first[0] == 0 and json.loads(first[1])["generated_tokens"] == 4
    for name in ("--checkpoint", "-c", "--model", "-m"):
        assert json.loads(trirun("generate", name, packed, *options)[1])["text"] == json.loads(first[1])["text"]
    assert trirun("inspect", packed, "--json")[1] == trirun("inspect", "-c", packed, "--json")[1]
    assert trirun("verify", packed)[0] == trirun("verify", "--checkpoint", packed)[0] == 0


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "inspect", "verify"])
def test_one_checkpoint_and_no_more(trirun, packed, command):
    code, _, err = trirun(command)
    assert code == 2 and "no checkpoint is given" in err and "demo" in err
    code, _, err = trirun(command, packed, "-c", packed)
    assert code == 2 and "CHECKPOINT and --checkpoint are both given" in err


def test_eval_and_verify_compare_an_argument_with_the_model(trirun, packed, ternary_model):
    options = ("--window", 32, "--limit", 2, "--json")
    document = json.loads(trirun("eval", packed, "--model", ternary_model, *options)[1])
    assert document["models"].keys() == {"model", "checkpoint"}
    code, out, _ = trirun("verify", packed, "--model", ternary_model)
    assert code == 0 and "bit for bit" in out


def test_threads_change_no_token(trirun, packed):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    documents = [json.loads(trirun("generate", packed, "-p", "a", "--json", "--threads", n)[1]) for n in (1, 2)]
    assert documents[0]["text"] == documents[1]["text"]
    assert "1 thread," in documents[0]["engine"] and "2 threads" in documents[1]["engine"]


def test_demo_is_the_model_that_ships_with_trirun_from_anywhere(trirun, tmp_path, monkeypatch, demo_model, packed):
    from pathlib import Path

    from trirun_cli.checkpoint.hub import local_model, model_name

    monkeypatch.chdir(tmp_path)
    assert local_model(Path("demo")) == demo_model and model_name(Path("demo")) == "demo"
    code, out, _ = trirun("generate", "demo", "-p", "The sea", "-n", 3, "--json")
    assert code == 0 and json.loads(out)["generated_tokens"] == 3
    code, out, _ = trirun("eval", "--model", "demo", "--window", 32, "--limit", 1, "--json")
    assert code == 0
    code, _, err = trirun("quantize", "demo", "--preset", "nonsense")
    assert code != 0 and "demo: no such" not in err
    # What exists here by that name is meant.
    (tmp_path / "demo").symlink_to(packed)
    assert local_model(Path("demo")) == Path("demo")
    assert trirun("verify", "demo")[0] == 0
