"""Models downloaded by name, from a stand-in for the hub on this machine: which files, how, and every refusal."""

import hashlib
import multiprocessing
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.checkpoint.formats.gguf_writer import DATA
from tests.checkpoint.hub_server import COMMIT, Repository, serving
from tests.told import Told
from trirun_cli.checkpoint import hub as hub_module
from trirun_cli.checkpoint.hub import local_model
from trirun_cli.errors import InputError, TrirunError
from trirun_cli.workflows.export import export

TERNARY = (DATA / "tiny-qwen3-TQ2_0.gguf").read_bytes()
LLAMA = (DATA / "tiny-llama-Q2_0.gguf").read_bytes()
ASKED = ("--prompt", "one two", "--max-tokens", 3, "--temperature", 0, "--device", "cpu")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``hub(some-org__name=Repository(...))``: the address of a hub; models go into an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    servers = []

    def start(**repositories):
        server = serving({name.replace("__", "/"): repository for name, repository in repositories.items()})
        address = server.__enter__()
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        return address

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def quantized():
    """A repository like those of Ternary-Bonsai: one model in several types."""
    names = ("tiny-F16.gguf", "tiny-Q2_0.gguf", "tiny-TQ2_0.gguf", "mmproj-tiny-F16.gguf", "README.md")
    return Repository({name: b"GGUF" + name.encode() for name in names} | {"tiny-TQ2_0.gguf": TERNARY})


def test_the_right_file_of_a_gguf_repository_runs_and_no_other_is_downloaded(hub, trirun):
    repository = Repository({"tiny-F16.gguf": b"GGUF", "tiny-TQ2_0.gguf": TERNARY, "README.md": b"#"})
    hub(org__tiny=repository)
    code, out, err = trirun("generate", "org/tiny", *ASKED)
    assert code == 0 and out, err
    assert "org/tiny: tiny-TQ2_0.gguf, TQ2_0 is the first of the 2-bit and ternary types there" in err
    assert repository.sent == [("tiny-TQ2_0.gguf", 0)]
    code, again, err = trirun("generate", "org/tiny", *ASKED)
    assert (code, again) == (0, out) and len(repository.sent) == 1, err


def test_a_file_of_the_user_s_choice(hub, trirun):
    repository = quantized()
    hub(org__tiny=repository)
    for asked in ("tiny-TQ2_0.gguf", "TQ2_0", "tq2_0"):
        assert local_model(Path(f"org/tiny:{asked}")).name == "tiny-TQ2_0.gguf"
    assert local_model(Path("org/tiny")).name == "tiny-Q2_0.gguf"
    assert local_model(Path(f"org/tiny@{COMMIT}:F16")).name == "tiny-F16.gguf"
    with pytest.raises(InputError, match=r"no GGUF file Q8_0; it has tiny-F16\.gguf, tiny-Q2_0\.gguf, tiny-TQ2_0"):
        local_model(Path("org/tiny:Q8_0"))
    with pytest.raises(InputError, match=r"gguf may be tiny-F16\.gguf, tiny-Q2_0\.gguf, tiny-TQ2_0\.gguf"):
        local_model(Path("org/tiny:gguf"))


def test_what_is_packed_is_called_by_the_repository(hub, trirun):
    hub(org__tiny=Repository({"tiny-TQ2_0.gguf": TERNARY}))
    code, _, err = trirun("pack", "org/tiny")
    assert code == 0 and Path("tiny-packed/config.json").is_file() and "its only GGUF file" in err, err


def test_a_cut_download_resumes_where_it_was(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    repository = Repository({"tiny-TQ2_0.gguf": TERNARY}, cut=100_000)
    hub(org__tiny=repository)
    assert local_model(Path("org/tiny")).read_bytes() == TERNARY
    (_, first), (_, second) = repository.sent
    assert first == 0 and 90_000 < second <= 100_000


def test_a_file_that_arrives_damaged_is_removed_and_said(hub):
    repository = Repository({"tiny-TQ2_0.gguf": TERNARY, "tiny-F16.gguf": b"GGUF"}, damaged=["tiny-TQ2_0.gguf"])
    hub(org__tiny=repository)
    with pytest.raises(TrirunError, match=r"tiny-TQ2_0\.gguf arrived with SHA-256 \w{64}, the hub has"):
        local_model(Path("org/tiny"))
    repository.damaged.clear()
    assert local_model(Path("org/tiny")).read_bytes() == TERNARY
    assert len(repository.sent) == 2


def test_a_directory_of_safetensors_comes_whole_and_is_checked(hub, demo_model, trirun):
    files = {file.name: file.read_bytes() for file in demo_model.iterdir() if file.suffix in (".json", ".safetensors")}
    repository = Repository(files | {"model.gguf": b"GGUF", "onnx/model.onnx": b"other"}, damaged=["model.safetensors"])
    hub(org__demo=repository)
    with pytest.raises(TrirunError, match=r"model\.safetensors arrived with SHA-256"):
        local_model(Path("org/demo"))
    repository.damaged.clear()
    folder = local_model(Path("org/demo@main"))
    assert {name for name in files if (folder / name).read_bytes() == files[name]} == set(files)
    assert not (folder / "model.gguf").exists() and not (folder / "onnx").exists()
    assert local_model(Path("org/demo:model.gguf")).name == "model.gguf"


def test_a_directory_that_another_program_packed_runs_by_name_packed_once(hub, packed, tmp_path, trirun):
    export(packed, tmp_path / "M", to="mlx")
    hub(org__mlx=Repository({file.name: file.read_bytes() for file in (tmp_path / "M").iterdir()}))
    code, out, err = trirun("generate", "org/mlx", *ASKED)
    assert code == 0 and "once" in err, err
    assert (tmp_path / "cache" / "trirun").exists() and trirun("generate", packed, *ASKED)[1] == out
    code, again, err = trirun("generate", "org/mlx", *ASKED)
    assert (code, again) == (0, out) and "once" not in err, err


def test_what_is_in_the_cache_needs_no_hub(hub, monkeypatch):
    hub(org__tiny=quantized())
    found = local_model(Path("org/tiny:TQ2_0"))
    # A port where nobody answers.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_model(Path("org/tiny:TQ2_0")) == found == local_model(Path("org/tiny"))
    for name in ("org/other", "org/tiny@branch"):
        with pytest.raises(InputError, match="the hub is not reached"):
            local_model(Path(name))


def test_a_private_repository_wants_a_token(hub, monkeypatch):
    hub(org__private=Repository({"tiny-TQ2_0.gguf": TERNARY}, token="secret"))
    with pytest.raises(InputError, match="no such model on the hub") as refused:
        local_model(Path("org/private"))
    assert refused.value.fix == "hf auth login, if it is private"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert local_model(Path("org/private")).read_bytes() == TERNARY


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/none", "no such model on the hub"),
        ("org/gated", "a gated model of the hub"),
        ("org/tiny@v2", "org/tiny@v2: the hub has no such revision of it"),
        ("org/bin", "no safetensors and no GGUF files; it has config.json, pytorch_model.bin"),
        ("org/empty", "no safetensors and no GGUF files"),
        ("org/parts", "of the 3 parts of big-TQ2_0.gguf there are 2"),
        ("org/two", "several GGUF files that may be meant: a-Q2_0.gguf, b-Q2_0.gguf"),
        ("org/many", "several GGUF files that may be meant: m-F16.gguf, m-Q4_K_M.gguf"),
    ],
)
def test_refusals_are_one_line(hub, trirun, name, words):
    hub(
        org__gated=Repository({"m-TQ2_0.gguf": TERNARY}, gated=True),
        org__tiny=quantized(),
        org__bin=Repository({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        org__empty=Repository({}),
        org__parts=Repository({f"big-TQ2_0-0000{part}-of-00003.gguf": b"GGUF" for part in (1, 3)}),
        org__two=Repository({"a-Q2_0.gguf": b"GGUF", "b-Q2_0.gguf": b"GGUF"}),
        org__many=Repository({"m-F16.gguf": b"GGUF", "m-Q4_K_M.gguf": b"GGUF"}),
    )
    for command in (("pack", name), ("generate", name, "-p", "x"), ("inspect", name)):
        code, out, err = trirun(*command)
        assert code == 3 and out == "" and words in " ".join(err.split()), err
    assert os.listdir() == []


def download(name: str, barrier, answers) -> None:
    barrier.wait()
    path = local_model(Path(name))
    answers.put((str(path), hashlib.sha256(path.read_bytes()).hexdigest()))


def test_two_processes_that_download_one_model_at_once_both_have_it_whole(hub, tmp_path):
    content = random.Random(0).randbytes(8 << 20)
    repository = Repository({"tiny-Q2_0.gguf": content})
    hub(org__tiny=repository)
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(3, timeout=60), fork.SimpleQueue()
    runs = [fork.Process(target=download, args=("org/tiny", barrier, answers)) for _ in range(2)]
    for run in runs:
        run.start()
    barrier.wait()
    while any(run.is_alive() for run in runs):
        # What has its final name is whole at any time. Not looked for everywhere: temporary folders come and go.
        found = (tmp_path / "hub").glob("models--org--tiny/snapshots/*/*.gguf")
        assert all(file.stat().st_size == len(content) for file in found)
    assert [run.exitcode for run in runs] == [0, 0]
    (first, second), expected = (answers.get(), answers.get()), hashlib.sha256(content).hexdigest()
    assert first == second == (first[0], expected) and repository.sent == [("tiny-Q2_0.gguf", 0)]


def test_a_second_download_says_that_it_waits(hub, tmp_path, monkeypatch):
    content = random.Random(1).randbytes(1 << 16)
    repository = Repository({"tiny-Q2_0.gguf": content})
    hub(org__tiny=repository)
    begun, go_on, download = threading.Event(), threading.Event(), huggingface_hub.snapshot_download

    def slow(*arguments, **settings):
        begun.set()
        assert go_on.wait(60)
        return download(*arguments, **settings)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", slow)
    console = Told()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(local_model, Path("org/tiny"))
        assert begun.wait(60)
        second = threads.submit(local_model, Path("org/tiny"), console)
        while not any("waiting" in note for note in console.notes):
            assert not second.done()
            time.sleep(0.01)
        go_on.set()
        assert second.result() == first.result() and first.result().read_bytes() == content
    assert console.notes[-1] == "waiting for another run that is downloading org/tiny; Ctrl-C stops"
    assert repository.sent == [("tiny-Q2_0.gguf", 0)]
    # Nothing is written where nothing is to be downloaded.
    assert not list((tmp_path / "hub").rglob("trirun-*.lock"))
    monkeypatch.setattr(hub_module, "in_turn", None)
    assert local_model(Path("org/tiny")) == first.result()
