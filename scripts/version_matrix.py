"""Run the fast tests with the lowest versions of dependencies that pyproject.toml allows, and with the newest.

    python scripts/version_matrix.py lowest newest --torch 2.13.0
    python scripts/version_matrix.py lowest --keep /tmp/versions -- tests/server -m "not slow"

Each end is an environment of its own, of the Python that runs this script, with trirun installed from a copy of the
tracked files. Tools of the tests (pytest, openai, ...) are the newest in both. Network: pip's index. What it offers of
torch may be the CUDA build, of gigabytes: --torch names a release to take in both ends instead.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# What a user installs; the other extras are tools of the tests, or need a GPU.
EXTRAS = ("serve", "eval")
TESTS = ["tests", "--ignore=tests/kernels", "--ignore=tests/scripts", "-m", "not slow", "-q"]


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, of trirun itself and of :data:`EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(text) for text in (*project["dependencies"], *(each for name in EXTRAS for each in extras[name]))
    ]


def lowest(requirement: Requirement) -> str | None:
    """The lowest release that a requirement allows, as a pin; None where it has no lower bound."""
    bounds = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==")]
    return f"{canonicalize_name(requirement.name)}=={bounds[0]}" if bounds else None


def install(end: str, place: Path, torch: str | None) -> Path:
    """Make the environment of an end below a folder; returns its Python.

    Args:
        end: "lowest" or "newest". torch: its release in either end; None is as of every other package.
    """
    pins = {pin.partition("==")[0]: pin for each in requirements() if end == "lowest" and (pin := lowest(each))}
    if torch is not None:
        pins["torch"] = f"torch=={torch}"
    constraints = place / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins.values()))
    tree = place / "trirun"
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (models := ROOT.parent / "shared").is_dir():
        (place / "shared").unlink(missing_ok=True)
        (place / "shared").symlink_to(models)
    python = place / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place / "venv")], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "--editable", f"{tree}[dev]"], check=True, env=os.environ | {"TRIRUN_CUDA": "0"})
    return python


def versions(python: Path) -> list[str]:
    """What an environment has of :func:`requirements`, as pins."""
    names = [canonicalize_name(each.name) for each in requirements()]
    code = "import sys; from importlib.metadata import version\nfor n in sys.argv[1:]: print(f'{n}=={version(n)}')"
    return subprocess.check_output([str(python), "-c", code, *names], text=True).split()


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs="+", choices=["lowest", "newest"])
    parser.add_argument("--torch", help="release of torch to take in both ends")
    parser.add_argument("--keep", type=Path, help="folder for the environments; default: one that is removed")
    arguments, tests = sys.argv[1:], []
    if "--" in arguments:
        arguments, tests = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = parser.parse_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory(prefix="versions-") as made:
        for end in options.ends:
            place = (options.keep or Path(made)).resolve() / end
            place.mkdir(parents=True, exist_ok=True)
            try:
                python = install(end, place, options.torch)
                print(f"{end}: {' '.join(versions(python))}", flush=True)
                command = [str(python), "-m", "pytest", *(tests or TESTS)]
                code = subprocess.run(command, cwd=place / "trirun", check=False).returncode
            except subprocess.CalledProcessError as error:
                print(f"{end}: {' '.join(map(str, error.cmd))}: exit code {error.returncode}", file=sys.stderr)
                code = error.returncode
            if code:
                failed.append(end)
            print(f"{end}: {'FAILED' if code else 'passed'}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
