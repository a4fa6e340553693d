"""The house rules that a program can check: who imports whom, how full a folder is, what must be documented."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"trirun_cli": ROOT, "trirun_gptq": ROOT / "gptq", "trirun_kernels": ROOT / "kernels"}
FULL = 16  # files that one folder may hold; a newcomer reads no longer list
GUIDE_LINES, GUIDE_COLUMNS = 300, 160


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the three packages by its dotted name; a package is its ``__init__``."""
    found = {}
    for package, parent in PACKAGES.items():
        for path in (parent / package).rglob("*.py"):
            parts = path.relative_to(parent).with_suffix("").parts
            found[".".join(parts)] = ast.parse(path.read_text())
    return found


def name_of(module: str) -> str:
    return module.removesuffix(".__init__")


def imported(module: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere: at its top, in a function, or for types alone."""
    names = {name_of(each) for each in modules()}
    package = module.rpartition(".")[0]
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                target = f"{base}.{alias.name}"
                found = target if target in names else base
                if found in names and found != name_of(module):
                    yield found
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    assert not circle({name_of(module): set(imported(module)) for module in modules()})


def test_rooms_import_each_other_in_one_direction() -> None:
    def room(module: str) -> str:
        parts = module.split(".")
        # Each integration is trirun inside of another library, and stands for itself.
        depth = 1 if parts[0] != "trirun_cli" else 3 if parts[1:2] == ["integrations"] else 2
        return ".".join(parts[:depth])

    graph: dict[str, set[str]] = {}
    for module in modules():
        if name_of(module) not in PACKAGES:  # what a package exports may come from any of its rooms
            here = room(name_of(module))
            graph.setdefault(here, set()).update(room(there) for there in imported(module) if room(there) != here)
    assert not circle(graph)
    assert not {room for room in graph["trirun_kernels"] if not room.startswith("trirun_kernels")}
    assert not {room for room in graph["trirun_gptq"] if not room.startswith("trirun_kernels")}


def test_folders_hold_what_a_newcomer_can_read() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("not a git checkout")
    sources = [Path(name) for name in tracked.splitlines() if not name.startswith(("scripts/", "configs/", "."))]
    files = Counter(path.parent.as_posix() for path in sources if path.name not in ("py.typed", "__init__.py"))
    assert not {folder: count for folder, count in files.items() if count > FULL}


def test_public_names_are_documented() -> None:
    """Modules, functions and classes have docstrings; methods too, but where a base class documents them."""
    missing = []
    for module, tree in modules().items():
        if not ast.get_docstring(tree):
            missing.append(module)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                if not ast.get_docstring(node):
                    missing.append(f"{module}.{node.name}")
                if isinstance(node, ast.ClassDef) and not node.bases:
                    missing += [
                        f"{module}.{node.name}.{method.name}"
                        for method in node.body
                        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                        and method.name[0] != "_"
                        and not ast.get_docstring(method)
                    ]
    assert not missing


@pytest.mark.parametrize("guide", ["README.md", "kernels/README.md", "gptq/README.md", "CONTRIBUTING.md"])
def test_guides_are_short_and_fit_a_screen(guide: str) -> None:
    lines = (ROOT / guide).read_text().splitlines()
    assert len(lines) <= GUIDE_LINES
    # Tables and links may be wider than text.
    assert not [line for line in lines if len(line) > GUIDE_COLUMNS and not line.startswith("|")]
