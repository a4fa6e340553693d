"""Which compilers and flags a build takes, for which architectures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import trirun_build
import trirun_toolchain
from trirun_toolchain import ALL_ARCHS, CUDA_WHEELS, PTX_OF, BuildError, arch_of, find_nvcc, gencode, parse_archs


def test_architectures_of_the_same_features_are_made_from_one_ptx() -> None:
    assert gencode(ALL_ARCHS, ptx=True) == (
        *("-gencode", "arch=compute_80,code=[sm_80,sm_86,sm_89,compute_80]"),
        *("-gencode", "arch=compute_90a,code=[sm_90a]"),
        *("-gencode", "arch=compute_100,code=[sm_100,sm_120,compute_100]"),
    )
    assert gencode(["90a"], ptx=True) == ("-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")
    assert gencode(["89"], ptx=False) == ("-gencode", "arch=compute_80,code=[sm_89]")
    assert gencode(["120"], ptx=True) == ("-gencode", "arch=compute_100,code=[sm_120,compute_100]")


def test_no_kernel_tells_architectures_apart_that_share_a_ptx(repo_root: Path) -> None:
    csrc = repo_root / "kernels" / "csrc" / "cuda"
    asked = "".join(path.read_text() for path in csrc.rglob("*.cu*"))
    bounds = {int(number) for number in re.findall(r"__CUDA_ARCH__ *(?:>=|<) *(\d+)", asked)}
    assert bounds
    # Nothing else is asked of __CUDA_ARCH__ than such bounds, and whether there is one at all.
    assert not re.search(r"(?<!defined\()__CUDA_ARCH__(?! *(?:>=|<) *\d)", asked)
    for arch, ptx in PTX_OF.items():
        assert not [bound for bound in bounds if int(ptx) * 10 < bound <= int(arch) * 10]


def test_which_files_belong_to_one_architecture() -> None:
    assert [arch_of(Path(name)) for name in ("x_sm90.cu", "x_sm90a.cu", "x_sm80.cu", "x.cu")] == [
        "90a",
        "90a",
        None,
        None,
    ]


def test_architectures_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_archs("80, 90a sm_120") == ("80", "90a", "120")
    with pytest.raises(BuildError, match="'hopper' is not a CUDA architecture"):
        parse_archs("hopper")
    for text, archs in (("", ALL_ARCHS), ("0", ()), ("90a,120", ("90a", "120"))):
        monkeypatch.setenv("TRIRUN_CUDA", text)
        assert trirun_build.cuda_archs() == archs


def test_compiler_wheels_are_asked_for_where_nvcc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIRUN_CUDA", raising=False)
    monkeypatch.setattr(trirun_build, "find_nvcc", lambda: None)
    for hook in (trirun_build.get_requires_for_build_wheel, trirun_build.get_requires_for_build_editable):
        assert set(CUDA_WHEELS) <= set(hook())
        assert not any("torch" in requirement for requirement in hook())
    monkeypatch.setenv("TRIRUN_CUDA", "0")
    assert not set(CUDA_WHEELS) & set(trirun_build.get_requires_for_build_wheel())


def test_nvcc_of_the_wheels_is_found_and_an_old_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(folder: Path, release: str) -> Path:
        folder.mkdir(parents=True)
        nvcc = folder / "nvcc"
        nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.1"\n')
        nvcc.chmod(0o755)
        return nvcc

    fake(tmp_path / "old", "11.8")
    wheel = fake(tmp_path / "site" / "nvidia" / "cu13" / "bin", "13.0")
    monkeypatch.setattr(trirun_toolchain.shutil, "which", lambda name: str(tmp_path / "old" / name))
    monkeypatch.setattr(trirun_toolchain.sys, "path", ["", str(tmp_path / "site")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    if not os.path.exists("/usr/local/cuda/bin/nvcc"):
        assert find_nvcc() == str(wheel)
    wheel.unlink()
    assert find_nvcc() in (None, "/usr/local/cuda/bin/nvcc")


def test_linking_for_an_older_glibc_takes_zig_and_the_compilers_own_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    cxx = trirun_toolchain.cxx_compiler()
    monkeypatch.setattr(trirun_toolchain.sys, "executable", "/bin/true")
    linker, flags = trirun_toolchain.old_glibc_linker(cxx, "2.28")
    assert linker[3:5] == ("cc", "-target") and linker[5].endswith("-linux-gnu.2.28")
    assert all(os.path.isfile(name) for name in flags[:-1]) and ".so" in flags[0]
    monkeypatch.setattr(trirun_toolchain.sys, "executable", "/bin/false")
    with pytest.raises(BuildError, match="takes zig: pip install ziglang"):
        trirun_toolchain.old_glibc_linker(cxx, "2.28")
