"""Checks that a packed checkpoint is whole. torch is imported for comparing it with its original alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from trirun_gptq.recipe_yaml import load_plain
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..errors import CheckFailed, InputError
from .formats import open_foreign
from .hub_files import WANTED
from .model_dir import ModelSource
from .reader import Checkpoint
from .writer import CHECKSUMS, RECIPE_FILE, file_hash

if TYPE_CHECKING:
    from torch import Tensor


# What a model is made of; a page about it may come or change later.
_PARTS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.py", RECIPE_FILE)
_SUM = re.compile(r"([0-9a-f]{64})  ([^/]+)")


def verify_files(path: Path) -> Iterator[tuple[str, str | None]]:
    """(file, problem or None) of a checkpoint: its SHA-256 against the one recorded when it was written.

    Raises:
        InputError: the record is damaged, or a file cannot be read.
    """
    recorded, where = _recorded_hashes(path)
    present = {file.name for pattern in _PARTS for file in path.glob(pattern)}
    if where == RECIPE_FILE:  # older checkpoints: of the weights alone
        present = {name for name in present if name.endswith(".safetensors")}
    for name in sorted(present | recorded.keys()):
        if name not in recorded:
            yield name, f"no checksum is recorded in {where}"
        elif not (path / name).is_file():
            # What a download leaves out may be missing.
            if any(fnmatch(name, pattern) for pattern in WANTED):
                yield name, f"{where} names it, and it is not there"
        elif file_hash(path / name) != recorded[name]:
            yield name, "its contents changed since it was written (SHA-256 differs)"
        else:
            yield name, None


def require_whole(path: Path) -> None:
    """Hold every file of a checkpoint against its recorded SHA-256.

    Raises:
        CheckFailed: one differs or is not there. InputError: nothing is recorded, or the record is damaged.
    """
    if not any((path / name).is_file() for name in (CHECKSUMS, RECIPE_FILE)):
        raise InputError(f"{path}: --verify needs {CHECKSUMS}, which trirun writes into its checkpoints")
    problems = [f"{name}: {problem}" for name, problem in verify_files(path) if problem is not None]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckFailed(f"{path}: {problems[0]}{more}", "copy or download it again")


def verify_modules(
    checkpoint: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    original: ModelSource | None = None,
    embeddings: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[tuple[str, str | None]]:
    """(module, problem or None): shape as the model's config has it, finite scales and zeros, a round trip through
    unpack and pack that changes no byte, and, given the original model, equality with its weight bit for bit.

    Args:
        linears: (n, k) of the model's linear layers by name, as :func:`trirun_cli.models.linears.linear_layers` has
            them. original: the model before it was quantized. embeddings: as linears, of its embedding.
    """
    weight_of = None if original is None else _weights(checkpoint, original)
    for module in checkpoint.modules:
        expected = (embeddings or {}) if module in checkpoint.format.embeddings else linears
        yield module, _module_problem(checkpoint, module, expected.get(module), weight_of)
    for name in sorted(set(linears) - set(checkpoint.modules) - set(checkpoint.format.modules_to_not_convert)):
        yield name, "the model has this linear layer, the checkpoint does not"


def _module_problem(
    checkpoint: Checkpoint,
    module: str,
    expected: tuple[int, int] | None,
    weight_of: Callable[[str], Tensor | None] | None,
) -> str | None:
    if expected is None:
        return "the model has no linear layer of this name"
    if checkpoint.shape(module) != expected:
        return f"packed as {list(checkpoint.shape(module))}, the model's config says {list(expected)}"
    w = checkpoint.codes(module)
    for suffix, values in ((SCALE, w.scales), (ZERO, w.zeros)):
        if values is not None and not np.isfinite(values).all():
            return f"{suffix[1:]} holds {np.count_nonzero(~np.isfinite(values))} values that are not finite"
    if not w.is_canonical:
        return "padding or order of the packed words is not canonical"
    if weight_of is None:
        return None
    stored = weight_of(module)
    if stored is None:
        return "the original has no such weight"
    source = stored.float().numpy()
    if source.shape != expected:
        return f"the original has shape {list(source.shape)}"
    different = _rounded(w.dense(), str(stored.dtype).removeprefix("torch.")) != source
    if different.any():
        row, column = divmod(int(different.argmax()), expected[1])
        count = f"{np.count_nonzero(different)} of {different.size} weights"
        return f"{count} differ from the original, the first at [{row}, {column}]"
    return None


def _weights(checkpoint: Checkpoint, original: ModelSource) -> Callable[[str], Tensor | None]:
    """The weights of an original by the checkpoint's module names; None for one that it does not have."""
    foreign = open_foreign(original)
    if foreign is not None:
        return foreign.dense
    from trirun_gptq.model.meta import meta_model
    from trirun_gptq.model.stored import StoredNames

    # Of the same model: its files may name, cut and turn the weights otherwise than the checkpoint's.
    names = StoredNames(meta_model(checkpoint.path), original)
    return lambda module: names.read(module + WEIGHT) if module + WEIGHT in names else None


def _rounded(dense: np.ndarray, dtype: str) -> np.ndarray:
    """A decoded weight, float32, rounded to a stored dtype; bfloat16 within float32."""
    if dtype != "bfloat16":
        return dense.astype(dtype)
    bits = dense.view(np.uint32)
    # To the nearest, ties to even.
    return (bits + 0x7FFF + ((bits >> 16) & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _recorded_hashes(path: Path) -> tuple[dict[str, str], str]:
    """(SHA-256 by file name, the file that records them)."""
    sums = path / CHECKSUMS
    if sums.is_file():
        lines = sums.read_text(encoding="utf-8", errors="replace").split("\n")
        found = [_SUM.fullmatch(line) for line in lines[:-1]]
        if lines[-1] or None in found:
            raise InputError(f"{sums} is damaged: it is no list of checksums")
        return {match[2]: match[1] for match in found if match}, CHECKSUMS
    file = path / RECIPE_FILE
    if not file.is_file():
        return {}, CHECKSUMS
    try:
        recipe = load_plain(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    files = (recipe.get("files") if isinstance(recipe, dict) else None) or {}
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files):
        raise InputError(f"{file}: files is {files!r}, not the checksums by name")
    return files, RECIPE_FILE if files else CHECKSUMS
