"""The packages that are built from a copy of the checkout, once for all tests of scripts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from trirun_compile import Tree, build_cpu

from tests.wheels import CHECKOUT, call_backend
from trirun_cli import __version__


@pytest.fixture(scope="session")
def checkout(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree with its CPU objects, where a build disturbs nobody."""
    copy = tmp_path_factory.mktemp("checkout")
    build_cpu(Tree(root=repo_root))
    for name in CHECKOUT:
        if (repo_root / name).is_dir():
            shutil.copytree(repo_root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
        elif (repo_root / name).exists():
            shutil.copy2(repo_root / name, copy)
    # Object files depend on content, not on place: the copy need not compile again.
    tree = Tree(root=repo_root)
    (copy / "build" / "native").mkdir(parents=True)
    for name in tree.report("cpu")["objects"].values():
        shutil.copy2(tree.objects / name, copy / "build" / "native")
    # As if CUDA had been built here once: a package made without CUDA must not pick it up.
    library = copy / "kernels" / "trirun_kernels" / "_lib" / "libtrirun_cuda.so"
    library.parent.mkdir()
    library.write_bytes(b"of another build")
    return copy


@pytest.fixture(scope="session")
def unpacked_sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(call_backend("build_sdist", checkout, out), out)
    unpacked = out / f"trirun-{__version__}"
    shutil.copytree(checkout / "build" / "native", unpacked / "build" / "native")
    return unpacked


@pytest.fixture(scope="session")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as users get it: from the source archive, not from the checkout. Built in a copy of its own, since a
    build leaves files behind."""
    copy = tmp_path_factory.mktemp("build") / unpacked_sdist.name
    shutil.copytree(unpacked_sdist, copy)
    return call_backend("build_wheel", copy, tmp_path_factory.mktemp("wheel"))
