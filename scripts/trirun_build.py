"""trirun's build backend (PEP 517 and 660): setuptools, after the native libraries are compiled.

As a command, it compiles them in place for development::

    python scripts/trirun_build.py [cpu|cuda|all] [--arch 90a] [--spills] [--lineinfo] [--verbose]

``pip wheel . --config-settings glibc=2.28`` links both libraries for an older glibc than this machine's
(scripts/release_wheels.py). The environment variable TRIRUN_CUDA chooses what a package build compiles for CUDA: unset,
every architecture of ``trirun_toolchain.ALL_ARCHS``; a list such as ``90a,120``, those; ``0``, nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from trirun_compile import Tree, build_cpu, build_cuda
from trirun_spills import spill_report
from trirun_toolchain import ALL_ARCHS, CUDA_WHEELS, BuildError, find_nvcc, parse_archs


def cuda_archs() -> tuple[str, ...]:
    """The architectures TRIRUN_CUDA asks for; none when it is 0."""
    text = os.environ.get("TRIRUN_CUDA", "")
    if text == "0":
        return ()
    return parse_archs(text) if text else ALL_ARCHS


def build_native(tree: Tree, glibc: str | None = None) -> None:
    """Compile what a package holds, or end the process with the reason on stderr: pip shows it as it is, without a
    traceback around it."""
    try:
        archs = cuda_archs()
        build_cpu(tree, glibc)
        if archs:
            build_cuda(tree, archs, glibc)
    except BuildError as error:
        raise SystemExit(f"trirun: {error}") from None


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """setuptools' own, and NVIDIA's compiler as wheels where CUDA is wanted and no nvcc is to be found."""
    return [*_setuptools().get_requires_for_build_wheel(config_settings), *_cuda_requires()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_setuptools().get_requires_for_build_editable(config_settings), *_cuda_requires()]


def get_requires_for_build_sdist(config_settings=None) -> list[str]:
    return _setuptools().get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None) -> str:
    return _setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None) -> str:
    return _setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    tree = Tree()
    build_native(tree, (config_settings or {}).pop("glibc", None))
    # setuptools never empties this folder: modules deleted since the last build would be in the wheel.
    shutil.rmtree(tree.root / "build" / "lib", ignore_errors=True)
    return _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    build_native(Tree())
    return _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None) -> str:
    return _setuptools().build_sdist(sdist_directory, config_settings)


def main(argv: Sequence[str] | None = None) -> int:
    """The development command. Returns 1 when the build fails or a kernel marked no-spill spills."""
    parser = argparse.ArgumentParser(description="Compile trirun's native libraries in place.")
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda", "all"), default="all")
    parser.add_argument("--arch", metavar="LIST", help=f"CUDA architectures, comma-separated [{','.join(ALL_ARCHS)}]")
    parser.add_argument("--spills", action="store_true", help="print registers and spills of each CUDA kernel")
    parser.add_argument("--lineinfo", action="store_true", help="keep source lines for profilers (CUDA)")
    parser.add_argument("--verbose", action="store_true", help="print every compiler call")
    options = parser.parse_args(argv)
    tree = Tree(verbose=options.verbose)
    try:
        if options.device != "cuda":
            build_cpu(tree)
        if options.device == "all" and find_nvcc() is None:
            tree.say("trirun: no nvcc, so no CUDA library; `cuda` instead of `all` says what is missing")
        elif options.device != "cpu":
            cuda_tree = Tree(verbose=options.verbose, extra_flags=("-lineinfo",) if options.lineinfo else ())
            build_cuda(cuda_tree, parse_archs(options.arch) if options.arch else ALL_ARCHS)
            if options.spills:
                text, bad = spill_report(cuda_tree)
                print(text)
                return 1 if bad else 0
    except BuildError as error:
        print(f"trirun: {error}", file=sys.stderr)
        return 1
    return 0


def _cuda_requires() -> list[str]:
    try:
        return list(CUDA_WHEELS) if cuda_archs() and find_nvcc() is None else []
    except BuildError as error:
        raise SystemExit(f"trirun: {error}") from None


def _setuptools():
    # Not on import: the development command runs where setuptools is not installed.
    from setuptools import build_meta

    return build_meta


if __name__ == "__main__":
    sys.exit(main())
