"""What every test may ask for: the checkout, the demo model, reference data beside the checkout, the command line in
this process, one thread; a tiny random model on disk: as it is, ternary, and packed."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.interrupts import sigint_handled_by

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where this machine cannot run them. Files that have slow tests come first: no
    process is to begin one when the others have nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        for mark in item.iter_markers("gpu"):
            if reason := why_no_gpu(**mark.kwargs):
                item.add_marker(pytest.mark.skip(reason=reason))


@cache
def why_no_gpu(capability: tuple[int, int] | None = None) -> str | None:
    """Why tests marked ``gpu`` cannot run here, or None.

    Args:
        capability: the compute capability they are for; None for any.
    """
    import torch
    from trirun_kernels.native import library_path

    if not torch.cuda.is_available():
        return "no CUDA device"
    if capability not in (None, torch.cuda.get_device_capability()):
        return f"no GPU of compute capability {capability[0]}.{capability[1]}"
    return None if library_path("cuda").exists() else "libtrirun_cuda.so is not built"


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays():
    """Collections of garbage pass over what is there before a module's tests: it is torch and transformers for the most
    part, whose many objects would be looked at each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def foreground():
    """Ctrl-C interrupts this process, as it does in the foreground of a terminal."""
    with sigint_handled_by():
        yield


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The model that ships with trirun: 8.4 M parameters, with calibration.txt and valid.txt beside it."""
    return ROOT / "configs" / "demo-model"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ../shared of larger models and texts; a test that asks for it is skipped where there is none."""
    folder = ROOT.parent / "shared"
    if not (folder / "models").is_dir():
        pytest.skip("no reference models in ../shared")
    return folder


@pytest.fixture(scope="session")
def _get_command():
    """``typer.main.get_command`` that makes trirun's commands once: at each call it takes longer than many of them."""
    from typer.main import get_command

    from trirun_cli.commands.app import app

    made = get_command(app)
    return lambda asked: made if asked is app else get_command(asked)


@pytest.fixture
def trirun(capsys, monkeypatch, _get_command):
    """Run the command line: ``trirun("pack", path)`` → (exit code, stdout, stderr)."""
    from trirun_cli.commands.app import main

    monkeypatch.setattr("typer.main.get_command", _get_command)

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["trirun", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", stdin)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def small_cache(monkeypatch):
    """For benchmarks whose figures nobody reads: a last-level cache that a few copies of a small matrix outlast."""
    from trirun_cli.bench import timing

    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 14)


@pytest.fixture(scope="session")
def _indexes():
    return {}


@pytest.fixture
def indexed_once(monkeypatch, _indexes):
    """lm-eval reads 13,000 files, for six seconds, to know its own tasks: once a process is enough."""
    from lm_eval.tasks import TaskManager

    make = TaskManager.__init__

    def init(self, *arguments, **options):
        if arguments or options or not _indexes:
            make(self, *arguments, **options)
        else:
            self.__dict__.update(_indexes)
        if not (arguments or options):
            _indexes.update(self.__dict__)

    monkeypatch.setattr(TaskManager, "__init__", init)


@pytest.fixture(scope="module")
def one_thread():
    """One thread for torch: where matrices are tiny, waiting for a second one on a busy machine is most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PROJECT_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="session")
def demo_tokenizer(pytestconfig):
    return [pytestconfig.rootpath / "configs" / "demo-model" / name for name in PROJECT_TOKENIZER]


@pytest.fixture(scope="session")
def save_llama(tmp_path_factory, demo_tokenizer):
    """Save a random Llama with the demo tokenizer: ``save_llama(change=...)`` → its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(change=None, shard_size="5GB", **config):
        shape = {
            "vocab_size": 8192,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": True,
        }
        import torch

        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(shape | config))).half()
        if change is not None:
            change(model)
        directory = tmp_path_factory.mktemp("model") / "llama"
        model.save_pretrained(directory, max_shard_size=shard_size)
        for file in demo_tokenizer:
            shutil.copy(file, directory)
        return directory

    return save


def make_ternary(model):
    """Every decoder matrix to {−s, 0, s}, one scale per matrix."""
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    scale = module.weight.abs().mean()
                    module.weight.copy_((module.weight / scale).round().clamp(-1, 1) * scale)


@pytest.fixture(scope="session")
def to_ternary():
    return make_ternary


@pytest.fixture(scope="session")
def plain_model(save_llama):
    return save_llama()


@pytest.fixture(scope="session")
def ternary_model(save_llama):
    return save_llama(make_ternary)


@pytest.fixture(scope="session")
def packed(ternary_model, tmp_path_factory):
    """The ternary model as a packed checkpoint. Read only: copy it before damaging it."""
    from trirun_cli.workflows.pack import pack

    out = tmp_path_factory.mktemp("packed") / "checkpoint"
    pack(ternary_model, out)
    return out


@pytest.fixture
def copy_of(tmp_path):
    """A private copy of a directory, optionally with its config.json's quantization section changed."""

    def copy(directory, **quantization):
        target = tmp_path / "copy"
        shutil.copytree(directory, target)
        if quantization:
            config = json.loads((target / "config.json").read_text())
            config["quantization_config"] |= quantization
            (target / "config.json").write_text(json.dumps(config))
        return target

    return copy


@pytest.fixture
def stored_by_head(copy_of):
    """A private copy of a tied model, its embeddings stored by the name of the head."""
    from safetensors.torch import load_file, save_file

    def copy(directory):
        target = copy_of(directory)
        tensors = load_file(target / "model.safetensors")
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    return copy
