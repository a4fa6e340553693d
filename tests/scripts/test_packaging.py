"""What leaves the checkout: wheel, source archive and editable install; and the house rules they rest on."""

from __future__ import annotations

import ast
import re
import subprocess
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.wheels import CHECKOUT, FOLDERS, call_backend, in_isolation
from trirun_cli import __version__

TOP_LEVEL = {"trirun_cli", "trirun_gptq", "trirun_kernels"}
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "_lib" not in path.parts
    }


@pytest.mark.slow
def test_source_archive_holds_everything_but_build_output(checkout: Path, unpacked_sdist: Path) -> None:
    for folder in FOLDERS:
        assert files_below(unpacked_sdist / folder) == files_below(checkout / folder), folder
    assert not list(unpacked_sdist.rglob("*.so"))
    assert {"LICENSE", "pyproject.toml"} <= {path.name for path in unpacked_sdist.iterdir()}


@pytest.mark.slow
def test_wheel_is_tagged_for_its_platform_and_for_no_python(wheel: Path) -> None:
    assert wheel.name == f"trirun-{__version__}-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"trirun-{__version__}.dist-info/WHEEL").decode().splitlines()
    assert "Root-Is-Purelib: false" in lines
    assert [line for line in lines if line.startswith("Tag:")] == [f"Tag: py3-none-{PLATFORM}"]


def test_wheel_holds_the_packages_and_nothing_at_top_level_that_is_anothers(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {*TOP_LEVEL, f"trirun-{__version__}.dist-info"}
    modules = {name for name in names if name.endswith(".py")}
    on_disk = {f"trirun_cli/{name}" for name in files_below(checkout / "trirun_cli") if name.endswith(".py")}
    for parent, package in (("kernels", "trirun_kernels"), ("gptq", "trirun_gptq")):
        on_disk |= {f"{package}/{name}" for name in files_below(checkout / parent / package) if name.endswith(".py")}
    assert modules == on_disk
    native = {name for name in names if name.startswith("trirun_kernels/_lib/")}
    assert native == {"trirun_kernels/_lib/libtrirun_cpu.so", "trirun_kernels/_lib/build_cpu.json"}
    configs = {name.removeprefix("trirun_cli/_data/configs/") for name in names if "/_data/configs/" in name}
    assert configs == files_below(checkout / "configs")


def test_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import trirun_kernels, trirun_gptq\n"
        "from trirun_kernels import native\n"
        "from trirun_cli.resources import configs_dir\n"
        "assert native.load('cpu').trirun_cpu_abi_version() == native.ABI_VERSION\n"
        "assert (configs_dir() / 'demo-model' / 'model.safetensors').is_file()\n"
        "print(native.LIBRARY_DIR, configs_dir(), trirun_gptq.__file__, sep='\\n')"
    )
    assert all(place.startswith(str(site)) for place in in_isolation(code, tmp_path, site).splitlines())


def test_editable_install_finds_the_packages_and_keeps_the_root_off_the_path(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(call_backend("build_editable", checkout, tmp_path)) as archive:
        archive.extractall(site)
    code = (
        "import site, sys\n"
        f"site.addsitedir({str(site)!r})\n"
        "import trirun_cli, trirun_kernels.native, trirun_gptq\n"
        "from trirun_cli.resources import configs_dir\n"
        "from importlib.util import find_spec\n"
        f"assert {str(checkout)!r} not in sys.path, sys.path\n"
        "assert not any(find_spec(name) for name in ('configs', 'scripts', 'tests', 'gptq'))\n"
        "assert trirun_kernels.native.load('cpu').trirun_cpu_abi_version() == trirun_kernels.native.ABI_VERSION\n"
        "print(trirun_cli.__file__, trirun_kernels.__file__, trirun_gptq.__file__, configs_dir(), sep='\\n')"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert all(place.startswith(str(checkout)) for place in in_isolation(code, elsewhere, site).splitlines())


FAKE_KERNELS = """
__version__ = "{version}"

class Anything:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return Anything()
    def __call__(self, *args, **kwargs): return args[0] if args and callable(args[0]) else Anything()

def use_kernel_forward_from_hub(name): return lambda cls: cls
def use_kernelized_func(*functions): return lambda cls: cls
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return type(name, (Anything,), {{}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("present", [True, False], ids=["with Hugging Face kernels", "without"])
def test_transformers_imports_in_the_checkout(repo_root: Path, tmp_path: Path, present: bool) -> None:
    """kernels/ in the working directory shadows nothing that transformers looks for under that name."""
    if present:
        from transformers.utils import import_utils

        version = import_utils.KERNELS_MIN_VERSION
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text(FAKE_KERNELS.format(version=version))
        (tmp_path / f"kernels-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
        (tmp_path / f"kernels-{version}.dist-info" / "METADATA").write_text(metadata)
    code = (
        "import sys; assert sys.path[0] == ''\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,\n"
        "    num_attention_heads=1))\n"
        "import kernels; print(is_kernels_available(), kernels.__file__, sep='\\n')"
    )
    available, place = in_isolation(code, repo_root, *([tmp_path] if present else [])).splitlines()[-2:]
    assert available == str(present)
    assert place == (str(tmp_path / "kernels" / "__init__.py") if present else "None")


def test_packages_in_pyproject_are_those_on_disk(repo_root: Path) -> None:
    settings = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"trirun_cli._data.configs"}
    for parent in (repo_root, repo_root / "kernels", repo_root / "gptq"):
        for init in parent.glob("trirun_*/**/__init__.py"):
            found.add(".".join(init.parent.relative_to(parent).parts))
    assert set(settings["packages"]) == found


def test_no_package_is_called_kernels(repo_root: Path) -> None:
    # It would hide Hugging Face's from transformers in this directory, and overwrite it when installed.
    assert not (repo_root / "kernels" / "__init__.py").exists()


def test_top_level_entries_are_the_house(repo_root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=repo_root, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("not a git checkout")
    entries = {name.split("/")[0] for name in tracked.splitlines() if not name.startswith(".")}
    assert entries <= {name for name in CHECKOUT if not name.startswith(".")}


def test_scripts_import_what_is_there(repo_root: Path) -> None:
    seen = 0
    for script in (repo_root / "scripts").glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in TOP_LEVEL:
                exec(ast.unparse(node), {})
                seen += 1
    assert seen


# Files that are longer than they should be: to be split, and never to grow.
LONG = {
    "kernels/csrc/trirun.h": 782,
    "kernels/trirun_kernels/decoder/cpu.py": 313,
    "kernels/trirun_kernels/decoder/cuda.py": 416,
    "kernels/trirun_kernels/decoder/cuda_experts.py": 377,
    "kernels/trirun_kernels/decoder/cuda_weights.py": 360,
    "kernels/trirun_kernels/decoder/shape.py": 369,
    "kernels/trirun_kernels/decoder/weights.py": 380,
    "tests/backends/test_cpu_model.py": 311,
    "tests/checkpoint/formats/test_gguf_model.py": 314,
    "tests/kernels/decoder/test_cuda.py": 311,
    "tests/kernels/decoder/test_cuda_ops.py": 309,
    "trirun_cli/engine/engine.py": 313,
}


def test_files_are_short_and_named_for_what_they_do(repo_root: Path) -> None:
    limits = {".py": 300, ".cu": 600, ".cuh": 600, ".cpp": 600, ".h": 600, ".sh": 300, ".yaml": 300}
    too_long = []
    for folder in ("trirun_cli", "kernels", "gptq", "scripts", "tests", "configs"):
        for path in (repo_root / folder).rglob("*"):
            assert path.name != "utils.py", path
            if path.suffix not in limits:
                continue
            name, lines = path.relative_to(repo_root), path.read_text().splitlines()
            allowed = LONG.get(str(name), limits[path.suffix])
            if len(lines) > allowed:
                too_long.append(f"{name}: {len(lines)} lines, {allowed} allowed")
            too_long += [f"{name}:{at}: {len(line)} columns" for at, line in enumerate(lines, 1) if len(line) > 120]
    assert not too_long


def test_constraints_pin_every_dependency_within_its_bounds(repo_root: Path) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    lines = (repo_root / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        # An extra may contain another one of trirun's own.
        if name not in ("vllm", "trirun"):
            assert requirement.specifier.contains(pins[name]), f"{requirement} is not met by {name}=={pins[name]}"


def test_one_version(repo_root: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)
    sources = [path for folder in ("trirun_cli", "kernels", "gptq") for path in (repo_root / folder).rglob("*.py")]
    stating = [path for path in sources if re.search(r"^__version__ = ", path.read_text(), re.MULTILINE)]
    assert stating == [repo_root / "trirun_cli" / "version.py"]
