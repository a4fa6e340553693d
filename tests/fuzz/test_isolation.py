"""No code of a model's runs: no pickle is read, and no modelling code that a model brings along."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch

SOURCES = ("trirun_cli", "kernels/trirun_kernels", "gptq/trirun_gptq", "scripts")
PICKLED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
OPTIONS = {"weights_only", "allow_pickle", "trust_remote_code"}


def test_no_source_reads_pickles_or_trusts_remote_code(repo_root: Path) -> None:
    found, seen = [], 0
    for path in (path for folder in SOURCES for path in (repo_root / folder).rglob("*.py")):
        seen += 1
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(repo_root)}:{getattr(node, 'lineno', 0)}"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{where} imports {name}" for name in names if name.split(".")[0] in PICKLED]
            if not isinstance(node, ast.Call):
                continue
            options = {option.arg: ast.unparse(option.value) for option in node.keywords if option.arg in OPTIONS}
            loads = getattr(node.func, "attr", None) == "load" and ast.unparse(node.func) == "torch.load"
            if loads and options.get("weights_only") != "True":
                found.append(f"{where} calls torch.load without weights_only=True")
            if options.get("allow_pickle", "False") != "False" or options.get("trust_remote_code", "False") != "False":
                found.append(f"{where} lets a file run code")
    assert seen > 200 and not found


def test_packing_and_generating_read_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoint.formats.gguf_writer import DATA
    from trirun_cli.llm import LLM
    from trirun_cli.workflows.pack import pack

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    pack(DATA / "tiny-qwen3-TQ2_0.gguf", tmp_path / "packed")
    assert LLM(tmp_path / "packed", device="cpu").generate(["one two"])
