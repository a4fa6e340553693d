"""Bad input: one clear line, the right exit code, nothing half-written."""

import errno
import io
import os
import shutil
import subprocess
import sys

import pytest
import torch

from trirun_cli.errors import explain


def one_line(err):
    return [line for line in err.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize("command", ["inspect", "verify", "pack", "quantize"])
def test_missing_directory(trirun, tmp_path, command):
    code, out, err = trirun(command, tmp_path / "nowhere")
    assert code == 3 and out == "" and len(one_line(err)) == 1 and "no such directory" in err


@pytest.mark.parametrize("command", ["inspect", "verify", "pack", "quantize"])
def test_not_a_model(trirun, tmp_path, command):
    (tmp_path / "folder").mkdir()
    code, _, err = trirun(command, tmp_path / "folder")
    assert code == 3 and len(one_line(err)) == 1 and "no config.json" in err


def test_a_file_is_not_a_model(trirun, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, err = trirun("generate", "--checkpoint", tmp_path / "file", "--prompt", "x")
    assert code == 3 and "a model is a directory" in err


def test_output_directory_that_is_not_empty(trirun, ternary_model, tmp_path):
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "precious.txt").write_text("keep me")
    for command in ("pack", "quantize"):
        code, _, err = trirun(command, ternary_model, "--out", tmp_path / "T")
        assert code == 3 and "is not empty" in err and "--overwrite" in err
    assert (tmp_path / "T" / "precious.txt").read_text() == "keep me"


def test_output_must_not_be_the_model(trirun, ternary_model):
    code, _, err = trirun("pack", ternary_model, "--out", ternary_model, "--overwrite")
    assert code == 3 and "holds the model itself" in err
    code, _, err = trirun("pack", ternary_model, "--out", ternary_model.parent, "--overwrite")
    assert code == 3 and "holds the model itself" in err and (ternary_model / "config.json").is_file()


def test_overwriting_replaces_nothing_but_models(trirun, ternary_model, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").write_text("keep me")
    code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "notes", "--overwrite")
    assert code == 3 and "no model directory" in err
    code, _, err = trirun("pack", ternary_model, "--out", tmp_path / "notes" / "precious.txt", "--overwrite")
    assert code == 3 and "is a file" in err
    assert (tmp_path / "notes" / "precious.txt").read_text() == "keep me"


def test_output_into_this_directory_and_through_a_link(trirun, ternary_model, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert trirun("pack", ternary_model, "--out", ".", "-q")[0] == 0
    (tmp_path / "link").symlink_to("here")
    assert trirun("pack", ternary_model, "--out", tmp_path / "link", "--overwrite", "-q")[0] == 0
    assert (tmp_path / "link").is_symlink() and trirun("verify", tmp_path / "here")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link"]


def test_a_pattern_that_is_none(trirun, ternary_model, tmp_path):
    code, _, err = trirun("pack", ternary_model, "--keep", "(", "--out", tmp_path / "T")
    assert code == 2 and "not a regular expression" in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("version",), ("version", "--json"), ("doctor", "--help")])
def test_a_full_disk_is_said_so(arguments, unbuffered):
    command = [sys.executable, "-m", "trirun_cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 1 and b"no space left" in done.stderr and b"Traceback" not in done.stderr


def test_what_libraries_say_of_an_output_that_cannot_be_written():
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        rust = type("SafetensorError", (Exception,), {})(f"I/O error: it said so (os error {number})")
        assert explain(rust).exit_code == 1 and "no space left" in str(explain(rust))
    read_only = explain(OSError(errno.EROFS, "Read-only file system", "Q.partial"))
    assert read_only.exit_code == 1 and str(read_only) == "Q.partial: Read-only file system"


def test_what_libraries_say_of_a_full_disk_and_of_memory():
    full = OSError(errno.ENOSPC, "No space left on device", "answers.jsonl")
    assert explain(full).exit_code == 1 and "answers.jsonl: no space left" in str(explain(full))
    copied = OSError(errno.ENOSPC, "No space left on device", "from.json", None, "to.json")
    assert "to.json: no space left" in str(explain(copied))
    assert explain(OSError(errno.ENOMEM, "Cannot allocate memory")).exit_code == 5
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        assert explain(error).exit_code == 5


@pytest.mark.parametrize("command", [("generate",), ("chat", "--plain")])
def test_text_that_is_not_utf8(trirun, packed, command):
    code, out, err = trirun(*command, "-c", packed, "-n", 1, stdin=io.TextIOWrapper(io.BytesIO(b"caf\xe9\n")))
    assert code == 3 and out == "" and len(one_line(err)) == 1 and "not UTF-8" in err
    argument = {"generate": "--prompt", "chat": "--system"}[command[0]]
    code, _, err = trirun(*command, "-c", packed, "-n", 1, argument, "caf\udce9", stdin=io.StringIO("x\n"))
    assert "not UTF-8" in err and (code == 3 or command[0] == "chat")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_an_empty_one(closed):
    done = subprocess.run(f"{sys.executable} -m trirun_cli version {closed}", shell=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr


def test_a_terminal_that_lacks_characters(trirun, packed):
    command = [sys.executable, "-m", "trirun_cli", "inspect", str(packed)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"128 ? 128" in done.stdout


def test_packing_what_is_packed(trirun, packed, tmp_path):
    code, _, err = trirun("pack", packed, "--out", tmp_path / "T")
    assert code == 3 and "quantized already" in err


def test_inspecting_what_is_not_packed(trirun, plain_model):
    code, _, err = trirun("inspect", plain_model)
    assert code == 3 and "is not quantized" in err


def test_quantize_rejects_what_has_no_kernel(trirun, plain_model, tmp_path):
    code, _, err = trirun("quantize", plain_model, "--wbits", "3", "--out", tmp_path / "Q")
    assert code == 2 and "--wbits 3" in err
    code, _, err = trirun("quantize", plain_model, "--group-size", "48", "--out", tmp_path / "Q")
    assert code == 2 and "--group-size" in err and "48" in err
    code, _, err = trirun("quantize", plain_model, "--group-size", "128", "--out", tmp_path / "Q")
    assert code == 2 and "k=192" in err and "--group-size 64" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_options_that_make_no_sense(trirun, packed, indexed_once):
    for arguments, message in [
        (("generate", "-c", packed, "-p", "x", "--temperature", "-1"), "--temperature must be"),
        (("generate", "-c", packed, "-p", "x", "--top-p", "0"), "--top-p must be"),
        (("generate", "-c", packed, "-p", "x", "--act-bits", "4"), "--act-bits 4"),
        (("generate", "-c", packed, "-p", "x", "-f", "y"), "one is enough"),
        (("generate", "-c", packed, "-p", "x", "--dtype", "int8"), "--dtype int8"),
        (("eval", "-c", packed, "--tasks", "nonsense"), "known tasks are"),
        (("eval",), "give --checkpoint"),
        (("eval", "-c", packed, "--window", "0"), "--window 0: at least 2"),
        (("eval", "-c", packed, "-t", "piqa", "--text", "x"), "--text: no task of --tasks piqa uses it"),
        (("eval", "-c", packed, "-t", "piqa,mmlu", "--window", "7"), "--window: no task of --tasks piqa,mmlu uses it"),
        (("eval", "-c", packed, "-t", "wikitext2", "--text", "x"), "--text: no task"),
        (("eval", "-c", packed, "--data-dir", "."), "--data-dir: no task of --tasks perplexity uses it"),
        (("eval", "-c", packed, "--num-fewshot", "5"), "--num-fewshot: no task"),
        (("eval", "-c", packed, "--seed", "0"), "--seed: no task"),
        (("eval", "-c", packed, "--batch-size", "4"), "--batch-size: no task"),
        (("eval", "-c", packed, "--chat-template"), "--chat-template: no task"),
        (("eval", "-c", packed, "-m", packed, "--max-ratio", "nan"), "--max-ratio nan"),
        (("generate", "-c", packed, "-p", "x", "--ctx", "0"), "--ctx 0: at least 1"),
        (("chat", "-c", packed, "--ctx", "-1"), "--ctx -1: at least 1"),
        (("generate", "-c", packed, "--batch", "0", "--prompts-file", "-"), "--batch 0"),
        (("serve", "-c", packed, "--threads", "100000"), "--threads 100000: this process may use"),
        (("serve", "-c", packed, "--port", "70000"), "--port 70000"),
        (("serve", "-c", "nothing", "--served-model-name", ""), "--served-model-name '': no name"),
        (("generate", "-c", packed, "-p", "x", "--device", "cuda:x"), "--device cuda:x: not one of"),
        (("generate", "-c", packed, "-p", "x", "--engine", "native", "--tf32"), "--tf32 is for transformers"),
        (("serve", "-c", packed, "--port", "0", "--engine", "native", "--compile"), "--compile is for transformers"),
        (("nonsense",), "No such command"),
    ]:
        code, out, err = trirun(*arguments)
        assert code == 2 and out == "" and message in err


def test_missing_gpu(trirun, packed):
    if torch.cuda.device_count() > 7:
        pytest.skip("this machine has that many GPUs")
    code, _, err = trirun("generate", "-c", packed, "-p", "x", "--device", "cuda:7")
    assert code == 4 and "CUDA devices" in err


def test_chat_without_a_template(trirun, packed):
    code, _, err = trirun("generate", "-c", packed, "-p", "x", "--chat")
    assert code == 3 and "no chat template" in err


@pytest.mark.parametrize(("value", "shown"), [("", False), ("0", False), ("1", True)])
def test_tracebacks_are_for_the_asking(value, shown):
    command = [sys.executable, "-m", "trirun_cli", "inspect", "/nowhere"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"TRIRUN_DEBUG": value})
    assert (b"Traceback" in done.stderr) == shown and b"/nowhere: no such directory" in done.stderr


def test_a_tokenizer_that_its_library_gives_up_on(trirun, packed, tmp_path, repo_root):
    # A BPE model whose merges are shorter than the prefix that is cut off them.
    hostile = repo_root / "tests" / "fuzz" / "corpus" / "tokenizer" / "panic"
    shutil.copytree(packed, tmp_path / "model")
    shutil.copy(hostile, tmp_path / "model" / "tokenizer.json")
    code, out, err = trirun("generate", tmp_path / "model", "--prompt", "a", "--device", "cpu")
    assert code == 3 and not out and "error: a library gave up on what a file holds: range end index" in err
