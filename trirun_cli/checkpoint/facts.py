"""Facts about a packed checkpoint, and the checks that it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from trirun_kernels import dequantize, pack, unpack

from ..errors import InputError
from .formats.bitnet import BitNetWeights
from .model_dir import ModelDir
from .reader import SCALE, WEIGHT, ZERO, Checkpoint
from .skeleton import build, linear_modules
from .writer import RECIPE_FILE, file_hash


def module_facts(checkpoint: Checkpoint, module: str) -> dict[str, Any]:
    """One packed module in numbers: shape, grid, stored bits per weight, code histogram, range of |scale|."""
    w = checkpoint.packed(module)
    codes, scales, _ = unpack(w)
    shares = torch.bincount(codes.flatten(), minlength=4).double() / codes.numel()
    magnitude = scales.float().abs()
    return {
        "name": module,
        "n": w.n,
        "k": w.k,
        "group_size": w.spec.group_size,
        "zero": w.spec.zero,
        "bits_per_weight": w.spec.bits_per_weight(w.k),
        "bytes": w.nbytes,
        "code_shares": [round(share, 4) for share in shares.tolist()],
        "scale_min": magnitude.min().item(),
        "scale_max": magnitude.max().item(),
    }


def totals(checkpoint: Checkpoint, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all modules: weights, mean bits per weight, packed bytes, bytes of everything else."""
    weights = sum(fact["n"] * fact["k"] for fact in facts)
    packed_bytes = sum(fact["bytes"] for fact in facts)
    return {
        "packed_weights": weights,
        "bits_per_weight": sum(fact["n"] * fact["k"] * fact["bits_per_weight"] for fact in facts) / weights,
        "packed_bytes": packed_bytes,
        "other_bytes": sum(file.stat().st_size for file in checkpoint.files) - packed_bytes,
    }


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
    linears = linear_modules(build(checkpoint))
    for module in checkpoint.modules:
        yield module, _module_problem(checkpoint, module, linears.get(module), original)
    for name in sorted(set(linears) - set(checkpoint.modules) - set(checkpoint.format.modules_to_not_convert)):
        yield name, "the model has this linear layer, the checkpoint does not"


def _module_problem(
    checkpoint: Checkpoint, module: str, expected: tuple[int, int] | None, original: ModelDir | None
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
    if original is None:
        return None
    bitnet = BitNetWeights.of(original)
    source = original.tensor(module + WEIGHT) if bitnet is None else bitnet.dense(module)
    if tuple(source.shape) != expected:
        return f"the original has shape {list(source.shape)}"
    different = dequantize(w, source.dtype) != source
    if different.any():
        row, column = divmod(int(different.flatten().int().argmax()), expected[1])
        count = f"{int(different.sum())} of {different.numel()} weights"
        return f"{count} differ from the original, the first at [{row}, {column}]"
    return None


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
