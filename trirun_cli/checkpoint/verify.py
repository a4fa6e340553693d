"""Checks that a packed checkpoint is whole. torch is imported for comparing it with its original alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..errors import InputError
from .formats import open_foreign
from .model_dir import ModelSource
from .reader import Checkpoint
from .writer import RECIPE_FILE, file_hash

if TYPE_CHECKING:
    from torch import Tensor


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
