"""setuptools commands of trirun: a wheel tagged for its platform but for no Python, and a complete source archive."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.install import install
from setuptools.command.sdist import sdist
from trirun_build import cuda_archs

# What a build from source, its tests and its readers need beside the packages' modules.
SDIST_FOLDERS = ("trirun_cli", "kernels", "gptq", "scripts", "configs", "tests", ".ci")
SDIST_SKIPPED = {"__pycache__", "_lib", ".scratch"}


class PlatformWheel(bdist_wheel):
    """py3-none-linux_<machine>: native code, but called through ctypes, so that any Python and torch will do."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


class Install(install):
    """Into the place for packages with native code, which setuptools takes only where it compiled something itself."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.install_lib = self.install_platlib


class BuildPy(build_py):
    """Leaves a CUDA library of an earlier build out of a package that was asked to have none."""

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        files = super().find_data_files(package, src_dir)
        return files if cuda_archs() else [name for name in files if not name.endswith(("_cuda.so", "_cuda.json"))]


class SourceArchive(sdist):
    """Everything the wheel is built and tested from, with or without version control at hand."""

    def make_distribution(self) -> None:
        self.filelist.exclude_pattern("*", prefix="kernels/trirun_kernels/_lib")
        self.filelist.extend(str(path) for folder in SDIST_FOLDERS for path in source_files(Path(folder)))
        self.filelist.remove_duplicates()
        super().make_distribution()


def source_files(folder: Path) -> list[Path]:
    """Files below a folder that a person wrote, as opposed to caches and build output."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SDIST_SKIPPED and not name.endswith(".egg-info"))
        found += [Path(place, name) for name in sorted(files) if not name.endswith((".pyc", ".so"))]
    return found
