"""The build of the native libraries, on small source trees of its own."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import trirun_build
import trirun_compile
from trirun_compile import Tree, build_cpu, build_cuda, compiler_logs
from trirun_kernels.native import ABI_VERSION
from trirun_spills import parse_usage, spill_report
from trirun_toolchain import BuildError, cuda_runtime, find_nvcc

HEADER = """
#pragma once
extern "C" __attribute__((visibility("default"))) int trirun_baseline();
extern "C" __attribute__((visibility("default"))) int trirun_wide();
// Which flags the copy of this function was compiled with that the linker kept.
inline __attribute__((noinline)) int copied() {
#ifdef __AVX2__
  return 2;
#else
  return 1;
#endif
}
"""
BASELINE = """
#include "shared.h"
#include <string>
int trirun_baseline() { return std::to_string(copied()).size() * copied(); }
"""
WIDE = """
#include "shared.h"
#ifdef __AVX2__
int trirun_wide() { return 10 * copied(); }
#else
int trirun_wide() { return -1; }
#endif
"""
CUDA = """
// no-spill: scaled<8>
// no-spill(90a): scaled
template <int N> __global__ void scaled(float* x) { x[threadIdx.x] *= N; }
template __global__ void scaled<8>(float*);
extern "C" __attribute__((visibility("default"))) int trirun_cuda_answer() { return 42; }
"""
# As ptxas -v of CUDA 13.0 writes it, shortened.
PTXAS_LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6scaledILi8EEvPf' for 'sm_90a'
ptxas info    : Function properties for _Z6scaledILi8EEvPf
    1200 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers, 1200 bytes cumulative stack size
ptxas info    : Compile time = 460.858 ms
ptxas info    : Compiling entry function '_Z6scaledILi2EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z6scaledILi2EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 17 registers, used 0 barriers, 2048 bytes smem, 360 bytes cmem[0]
"""

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc of a recent CUDA toolkit")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    csrc = tmp_path / "kernels" / "csrc"
    (csrc / "cpu").mkdir(parents=True)
    (csrc / "cuda").mkdir()
    (csrc / "exports.map").write_text("{ global: trirun_*; local: *; };\n")
    (csrc / "shared.h").write_text(HEADER)
    # Sorted by name the wide file comes first.
    (csrc / "cpu" / "a_avx2.cpp").write_text(WIDE)
    (csrc / "cpu" / "baseline.cpp").write_text(BASELINE)
    (csrc / "cpu" / "lonely.cpp").write_text('extern "C" int trirun_unlisted() { return 3; }\n')
    return Tree(root=tmp_path)


def exported(library: Path) -> set[str]:
    listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def test_library_loads_and_exports_the_interface_alone(tree: Tree) -> None:
    library = build_cpu(tree)
    assert exported(library) == {"trirun_baseline", "trirun_wide"}
    assert ctypes.CDLL(str(library)).trirun_baseline() == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is an instruction set of x86-64")
def test_flags_follow_the_file_name_and_never_leak_into_baseline_code(tree: Tree) -> None:
    library = ctypes.CDLL(str(build_cpu(tree)))
    assert tree.report("cpu")["isas"] == ["avx2"]
    # Both files hold a copy of copied(): had the linker kept the AVX2 one, the baseline would run AVX2 code.
    assert library.trirun_baseline() == 1
    assert library.trirun_wide() in (10, 20)


def test_other_processors_get_baseline_code_of_every_file(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trirun_compile.platform, "machine", lambda: "riscv64")
    assert ctypes.CDLL(str(build_cpu(tree))).trirun_wide() == -1
    assert tree.report("cpu")["isas"] == []
    assert tree.report("cpu")["skipped"] == {"avx2": "not an instruction set of riscv64"}


def test_instruction_set_unknown_to_the_compiler_is_recorded(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trirun_compile, "ISA_FLAGS", {platform.machine(): {"avx2": ("-mfrom-the-future",)}})
    assert ctypes.CDLL(str(build_cpu(tree))).trirun_wide() == -1
    assert "does not know all of -mfrom-the-future" in tree.report("cpu")["skipped"]["avx2"]


def test_nothing_changed_means_nothing_compiled(
    tree: Tree, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_cpu(tree)
    stamp = library.stat().st_mtime_ns
    monkeypatch.setattr(Tree, "run", lambda *arguments: pytest.fail("a compiler was called"))
    build_cpu(tree)
    assert library.stat().st_mtime_ns == stamp
    assert "libtrirun_cpu.so is up to date" in capfd.readouterr().err


def test_header_change_recompiles_the_files_that_include_it(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    build_cpu(tree)
    before = tree.report("cpu")["objects"]
    (tree.csrc / "shared.h").write_text(HEADER.replace("return 1;", "return 5;"))
    library = build_cpu(tree)
    after = tree.report("cpu")["objects"]
    assert {name for name in after if after[name] != before[name]} == {"a_avx2.cpp", "baseline.cpp"}
    assert "compiling 2 of 3 files" in capfd.readouterr().err
    assert ctypes.CDLL(str(library)).trirun_baseline() == 5


def test_other_flags_and_back_compile_once_each(tree: Tree, capfd: pytest.CaptureFixture[str]) -> None:
    build_cpu(tree)
    build_cpu(Tree(root=tree.root, extra_flags=("-DOTHER",)))
    capfd.readouterr()
    build_cpu(tree)
    told = capfd.readouterr().err
    assert "compiling" not in told
    assert "built libtrirun_cpu.so" in told


def test_old_objects_do_not_pile_up(tree: Tree) -> None:
    for number in range(trirun_compile.KEPT_OBJECTS + 3):
        (tree.csrc / "cpu" / "lonely.cpp").write_text(f"int number() {{ return {number}; }}\n")
        build_cpu(tree)
    assert len(list(tree.objects.glob("lonely-*.o"))) == trirun_compile.KEPT_OBJECTS


def test_compile_error_names_the_file_first_and_keeps_the_old_library(tree: Tree) -> None:
    library = build_cpu(tree)
    content = library.read_bytes()
    (tree.csrc / "cpu" / "baseline.cpp").write_text("int broken( { }\n")
    with pytest.raises(BuildError) as raised:
        build_cpu(tree)
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("kernels/csrc/cpu/baseline.cpp does not compile with ")
    assert any("error:" in line for line in rest)
    assert library.read_bytes() == content


def test_missing_function_fails_the_link_and_not_the_user(tree: Tree) -> None:
    (tree.csrc / "cpu" / "lonely.cpp").write_text("int nowhere();\nint f() { return nowhere(); }\n")
    with pytest.raises(BuildError, match=r"libtrirun_cpu\.so does not link\n(.|\n)*nowhere"):
        build_cpu(tree)


def test_missing_compiler_and_missing_sources_are_one_line(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"^no \.cu files in .*: the source tree is incomplete$"):
        build_cuda(tree)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler: no-such-compiler is not on PATH"):
        build_cpu(tree)


@pytest.mark.slow
@needs_nvcc
def test_cuda_library_of_two_architectures(tree: Tree) -> None:
    (tree.csrc / "cuda" / "scaled.cu").write_text(CUDA)
    (tree.csrc / "cuda" / "hopper_sm90.cu").write_text(
        "#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#ifdef __CUDA_ARCH__\n#error\n#endif\n#endif\n"
    )
    library = build_cuda(tree, ("80", "90a"))
    assert exported(library) == {"trirun_cuda_answer"}
    assert ctypes.CDLL(str(library)).trirun_cuda_answer() == 42
    usages = parse_usage(compiler_logs(tree, "cuda")[tree.csrc / "cuda" / "scaled.cu"])
    assert {(usage.name, usage.arch) for usage in usages} == {("scaled<8>", "80"), ("scaled<8>", "90a")}
    text, bad = spill_report(tree)
    assert not bad
    assert text.endswith("2 kernels, 2 no-spill lines, 0 broken, 0 stale")


def newest_glibc(library: Path) -> tuple[int, ...]:
    """The newest version of glibc that a symbol of a library needs."""
    listing = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\*UND\*.*\(GLIBC_([\d.]+)\)", listing)
    return max((tuple(map(int, version.split("."))) for version in needed), default=())


@pytest.mark.slow
@needs_nvcc
def test_both_libraries_load_with_an_older_glibc(tree: Tree) -> None:
    """Linked by nvcc, CUDA's needs what this machine has: libpthread's symbols of glibc 2.34, and those that the C++
    runtime's archive was made with."""
    pytest.importorskip("ziglang", reason="linking for an older glibc takes zig")
    (tree.csrc / "cuda" / "scaled.cu").write_text(CUDA)
    (tree.csrc / "cpu" / "baseline.cpp").write_text(BASELINE)
    libraries = build_cpu(tree, "2.28"), build_cuda(tree, ("80",), "2.28")
    before = [library.read_bytes() for library in libraries]
    shutil.rmtree(tree.objects)
    shutil.rmtree(tree.libraries)
    assert [build_cpu(tree, "2.28").read_bytes(), build_cuda(tree, ("80",), "2.28").read_bytes()] == before
    for library in libraries:
        assert newest_glibc(library) <= (2, 28)
        assert all(name.startswith("trirun_") for name in exported(library))
        ctypes.CDLL(str(library))
    assert ctypes.CDLL(str(library)).trirun_cuda_answer() == 42


@needs_nvcc
def test_the_archive_of_cudas_runtime_is_found() -> None:
    nvcc = find_nvcc()
    assert nvcc is not None and cuda_runtime(nvcc).name == "libcudart_static.a"


def test_usage_is_read_from_the_compiler_log() -> None:
    spilling, clean = parse_usage(PTXAS_LOG)
    assert (spilling.name, spilling.arch, spilling.registers) == ("scaled<8>", "90a", 48)
    assert (spilling.stack, spilling.spills, spilling.shared, clean.shared) == (1200, 12, 0, 2048)
    assert (spilling.symbol, clean.symbol) == ("_Z6scaledILi8EEvPf", "_Z6scaledILi2EEvPf")
    assert not spilling.clean
    assert (clean.name, clean.arch, clean.registers, clean.clean) == ("scaled<2>", "80", 17, True)


@pytest.mark.parametrize(
    ("mark", "fails", "says"),
    [
        ("no-spill: scaled<8>", True, "1 broken, 0 stale"),
        ("no-spill(80): scaled<8>", True, "0 broken, 1 stale"),
        ("no-spill(120): scaled<8>", False, "0 broken, 0 stale"),
        ("no-spill: scaled<2>", False, "0 broken, 0 stale"),
        ("no-spill(80, 90a): scaled<?>", True, "1 broken, 0 stale"),
        ("no-spill: renamed", True, "0 broken, 1 stale"),
    ],
)
def test_no_spill_marks(tree: Tree, mark: str, fails: bool, says: str) -> None:
    (tree.csrc / "cuda" / "scaled.cu").write_text(f"// {mark}\n")
    tree.libraries.mkdir(parents=True)
    tree.objects.mkdir(parents=True)
    (tree.libraries / "build_cuda.json").write_text('{"objects": {"scaled.cu": "scaled-0.o"}}')
    (tree.objects / "scaled-0.log").write_text(PTXAS_LOG)
    text, bad = spill_report(tree)
    assert bad is fails
    assert text.endswith(says)
    assert ("BROKEN: scaled<8> on sm_90a: 1200 bytes of stack, 12 of spills" in text) is ("1 broken" in says)
    assert "48+1200+12" in text


def test_command_reports_failure_in_its_exit_code(tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(trirun_build, "Tree", lambda **options: Tree(root=tree.root, **options))
    assert trirun_build.main(["cpu"]) == 0
    assert trirun_build.main(["cuda", "--arch", "hopper"]) == 1
    (tree.csrc / "cpu" / "lonely.cpp").write_text("broken\n")
    assert trirun_build.main(["cpu"]) == 1
    assert "trirun: kernels/csrc/cpu/lonely.cpp does not compile" in capsys.readouterr().err


def test_one_abi_number(repo_root: Path) -> None:
    header = (repo_root / "kernels" / "csrc" / "trirun.h").read_text()
    assert re.findall(r"#define TRIRUN_ABI_VERSION (\d+)", header) == [str(ABI_VERSION)]
