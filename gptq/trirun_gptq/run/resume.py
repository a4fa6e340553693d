"""Finished blocks on disk, so that a stopped run continues where it was, and only if it is the same run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from trirun_kernels import PackedWeight, QuantSpec, unpack
from trirun_kernels.weights.durable import publish_file

from ..block.walk import BlockResult
from ..errors import StateError
from ..layer.quantized import Quantized
from ..model.activations import has_bfloat16
from ..model.loader import TensorSource
from . import distributed as ranks
from .report import BlockReport, ModuleReport

FORMAT = 2
# What facts of another kind than were saved raise where they are used.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
PIECE = 1 << 15  # bytes of a weight file that are hashed at a time
PIECES = 1 << 10  # at most, spread over the file: up to 32 MiB all of it, and of large ones something of every matrix


class RunState:
    """A directory with one file per finished block and ``state.json``, which says what run they belong to. It is made
    with the first of them.

    Every file is written beside its name and renamed, so a file that exists is complete. Activations are not stored:
    a resumed run replays them through the finished blocks, which is exact and costs a forward pass each.

    Args:
        replace: remove what another run has left there, or what is damaged, instead of refusing it.

    Raises:
        StateError: the directory holds the state of another run; what differs is named, nothing is changed.
    """

    def __init__(self, directory: str | Path, fingerprint: dict[str, str], *, replace: bool = False) -> None:
        self.directory, self._fingerprint, self._replace = Path(directory), fingerprint, replace
        self._record = self.directory / "state.json"
        try:
            self._require_own()
        except StateError:
            if not replace:
                raise
            shutil.rmtree(self.directory, ignore_errors=True)

    def _require_own(self) -> None:
        if not self._record.exists():
            return
        try:
            stored = json.loads(self._record.read_text(encoding="utf-8"))
            if not isinstance(stored, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            raise StateError(f"{self._record} is damaged; remove {self.directory} to start over") from None
        ours = self._fingerprint
        differing = sorted(key for key in {*ours, *stored} if ours.get(key) != stored.get(key))
        if differing:
            raise StateError(
                f"{self.directory} is the state of another run (different {', '.join(differing)}); remove it to "
                "start over, or repeat the run that left it"
            )

    def begin(self) -> None:
        """Make the directory and say whose it is, unless that is done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._record.exists():
            _write(self._record, json.dumps(self._fingerprint, indent=2).encode())

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self._path(index).exists()

    def load(self, index: int) -> BlockResult | None:
        """A finished block, its report marked as resumed; None when it is not there.

        Raises:
            StateError: the block's file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self._path(index)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            return _block_result(facts, tensors)
        except (
            SafetensorError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            if self._replace:
                return None
            raise StateError(f"{path} is damaged ({error}); remove {self.directory} to start over") from None

    def save(self, index: int, result: BlockResult) -> None:
        """Record a finished block."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for name, weight in result.quantized.items():
            packed = weight.pack()
            for key in ("words", "scales", "zeros"):
                value = getattr(packed, key)
                if value is not None:
                    tensors[f"{name}.{key}"] = value.cpu()
        facts = {
            "modules": [dataclasses.asdict(module) for module in result.modules],
            "kept": result.kept,
            "report": dataclasses.asdict(result.report),
        }
        self.begin()
        _write(self._path(index), save(tensors, {"facts": json.dumps(facts)}))

    def _path(self, index: int) -> Path:
        return self.directory / f"block-{index:04d}.safetensors"


def _block_result(facts: dict[str, Any], tensors: dict[str, Tensor]) -> BlockResult:
    """A finished block as it was saved, its report marked as resumed."""
    modules = [ModuleReport(**{**entry, "spec": QuantSpec(**entry["spec"])}) for entry in facts["modules"]]
    prefix = f"{facts['report']['name']}."
    quantized = {}
    for module in modules:
        name = module.name.removeprefix(prefix)
        parts = (tensors[f"{name}.words"], tensors[f"{name}.scales"], tensors.get(f"{name}.zeros"))
        quantized[name] = Quantized(*unpack(PackedWeight(*parts, module.n, module.k, module.spec)), module.spec)
    report = BlockReport(**{**facts["report"], "resumed": True})
    return BlockResult(quantized, facts["kept"], modules, report)


class Settings(Protocol):
    """What determines a run, as plain values: a recipe of either kind."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        ...


def fingerprint(
    source: TensorSource, recipe: Settings, calibration: list[Tensor], device: torch.device
) -> dict[str, str]:
    """What must be equal for two runs to give the same bytes, each part under its own name.

    Args:
        source: the model; of large weight files, pieces of every matrix count.
        calibration: int64 [length] each. device: of the computation.
    """
    files = hashlib.sha256()
    for path in source.files:
        size = path.stat().st_size
        files.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start in (*range(0, size, max(PIECE, -(-size // PIECES))), max(0, size - PIECE)):
                file.seek(start)
                files.update(file.read(PIECE))
    tokens = hashlib.sha256()
    for sequence in calibration:
        tokens.update(f"{len(sequence)}:".encode() + sequence.numpy().tobytes())
    return {
        "format": str(FORMAT),
        "weights": files.hexdigest(),
        "config": _hash((source.path / "config.json").read_bytes()),
        "recipe": _hash(json.dumps(recipe.to_dict(), sort_keys=True).encode()),
        "calibration": tokens.hexdigest(),
        "device": f"{device.type}, bfloat16 {'on' if has_bfloat16(device) else 'off'}",
        "torch": torch.__version__,
        "processes": str(ranks.world()),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: Any) -> None:
    # Several processes may write the same file at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
    except OSError as error:
        # A write that fails does not say of which file.
        raise OSError(error.errno, error.strerror, str(partial)) from None
    publish_file(partial, path)
