"""One random ternary model as a trirun checkpoint and as GGUF files, for runs side by side with llama.cpp.

    python scripts/peer_models.py /tmp/models --family gemma2 --quantize PEER/llama.cpp/bin/llama-quantize

The files hold the same values: ``trirun export`` writes the checkpoint's. ``exact.gguf`` has float16 in all matrices;
in the others ``llama-quantize`` has made embedding and head what llama.cpp's users have (Q4_K, Q6_K), so they differ
there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peer_families

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "demo-model"
BASE = "TQ2_0"  # what trirun exports, before embedding and head are quantized


def write_trirun(out: Path, config: dict[str, Any]) -> None:
    """The checkpoint directory ``out``, a scale per row, with the demo model's tokenizer."""
    import synthetic_packed

    synthetic_packed.write(out, config)
    for file in DEMO.glob("*token*.json"):
        shutil.copy(file, out)


def write_gguf(checkpoint: Path, out: Path, kind: str) -> None:
    """The same model as one file, its matrices as ``kind`` and the others as the checkpoint has them."""
    from trirun_cli.workflows.export import export

    export(checkpoint, out, to=f"gguf:{kind}", pre="gpt-2", overwrite=True)


def make(folder: Path, config: dict[str, Any], quantize: Path, types: list[str]) -> tuple[Path, list[Path]]:
    """The checkpoint and a GGUF file per type under ``folder``; what exists is kept.

    Raises:
        SystemExit: llama-quantize failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, base = folder / "trirun", folder / "base.gguf"
    if not (checkpoint / "config.json").exists():
        shutil.rmtree(checkpoint, ignore_errors=True)
        write_trirun(checkpoint, config)
    files = [folder / f"{kind}.gguf" for kind in types]
    for kind, file in zip(types, files, strict=True):
        if file.exists():
            continue
        if not base.exists():
            write_gguf(checkpoint, base, BASE)
        partial = file.with_suffix(".partial")
        command = [str(quantize), "--allow-requantize", str(base), str(partial), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        partial.rename(file)
    base.unlink(missing_ok=True)
    return checkpoint, files


def exact_file(folder: Path) -> Path:
    """The checkpoint of ``folder`` as a file of float16 matrices."""
    if not (folder / "exact.gguf").exists():
        write_gguf(folder / "trirun", folder / "exact.gguf", "F16")
    return folder / "exact.gguf"


def folder_of(models: Path, family: str, name: str) -> Path:
    """Where a model of :data:`peer_families.FAMILIES` goes; ``name``: "tiny", or the other's."""
    return models / (f"{family}-tiny" if name == "tiny" else family)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=peer_families.FAMILIES, required=True)
    parser.add_argument("--quantize", type=Path, required=True, help="llama.cpp's llama-quantize")
    parser.add_argument("--types", default=BASE, help="GGUF types, comma-separated")
    options = parser.parse_args()
    for name, config in peer_families.configs(options.family).items():
        folder = folder_of(options.folder, options.family, name)
        checkpoint, files = make(folder, config, options.quantize, options.types.split(","))
        print(json.dumps({"model": name, "trirun": str(checkpoint), "gguf": list(map(str, files))}))


if __name__ == "__main__":
    main()
