"""Checks that a packed checkpoint is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import yaml
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.model.stored import StoredNames
from trirun_kernels import dequantize, pack, unpack
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..errors import InputError
from .formats import open_foreign
from .model_dir import ModelDir
from .reader import Checkpoint
from .writer import RECIPE_FILE, file_hash


def verify_files(checkpoint: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """(what, problem or None) per weight file: its SHA-256 against the one recorded when it was written."""
    recorded = _recorded_hashes(checkpoint.path)
    for file in checkpoint.files:
        if file.name not in recorded:
            yield file.name, f"no checksum is recorded in {RECIPE_FILE}"
        elif file_hash(file) != recorded[file.name]:
            yield file.name, "its contents changed since it was written (SHA-256 differs)"
        else:
            yield file.name, None


def verify_modules(checkpoint: Checkpoint, original: ModelDir | None = None) -> Iterator[tuple[str, str | None]]:
    """(module, problem or None): shape as the model's config has it, finite scales and zeros, a round trip through
    unpack and pack that changes no byte, and, given the original model, equality with its weight bit for bit."""
    model = meta_model(checkpoint.path)
    linears, dense = linear_modules(model), None
    if original is not None:
        foreign = open_foreign(original)
        # Of the same model: its files may name and cut the weights otherwise than the checkpoint's.
        dense = _stored(StoredNames(model, original)) if foreign is None else foreign.dense
    for module in checkpoint.modules:
        yield module, _module_problem(checkpoint, module, linears.get(module), dense)
    for name in sorted(set(linears) - set(checkpoint.modules) - set(checkpoint.format.modules_to_not_convert)):
        yield name, "the model has this linear layer, the checkpoint does not"


def _module_problem(
    checkpoint: Checkpoint,
    module: str,
    expected: tuple[int, int] | None,
    dense: Callable[[str], torch.Tensor | None] | None,
) -> str | None:
    if expected is None:
        return "the model has no linear layer of this name"
    if checkpoint.shape(module) != expected:
        return f"packed as {list(checkpoint.shape(module))}, the model's config says {list(expected)}"
    w = checkpoint.packed(module)
    for suffix, values in ((SCALE, w.scales), (ZERO, w.zeros)):
        if values is not None and not torch.isfinite(values).all():
            return f"{suffix[1:]} holds {int((~torch.isfinite(values)).sum())} values that are not finite"
    codes, scales, zeros = unpack(w)
    again = pack(codes, scales, w.spec, zeros)
    if not torch.equal(again.words, w.words) or not torch.equal(again.scales, w.scales):
        return "padding or order of the packed words is not canonical"
    if dense is None:
        return None
    source = dense(module)
    if source is None:
        return "the original has no such weight"
    if tuple(source.shape) != expected:
        return f"the original has shape {list(source.shape)}"
    different = dequantize(w, source.dtype) != source
    if different.any():
        row, column = divmod(int(different.flatten().int().argmax()), expected[1])
        count = f"{int(different.sum())} of {different.numel()} weights"
        return f"{count} differ from the original, the first at [{row}, {column}]"
    return None


def _stored(names: StoredNames) -> Callable[[str], torch.Tensor | None]:
    """The original's weight of a module, or None."""
    return lambda module: names.read(module + WEIGHT) if module + WEIGHT in names else None


def _recorded_hashes(path: Path) -> dict[str, str]:
    file = path / RECIPE_FILE
    if not file.is_file():
        return {}
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    files = (recipe.get("files") if isinstance(recipe, dict) else None) or {}
    if not isinstance(files, dict):
        raise InputError(f"{file}: files is {files!r}, not the checksums by name")
    return files
