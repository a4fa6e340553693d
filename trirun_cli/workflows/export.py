"""``trirun export`` for programs: a packed checkpoint in the format of another program, without loss or not at all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.run.progress import Event, ModuleStarted, ProgressCallback, silent
from trirun_kernels.weights.names import HEAD_MODULE, SCALE, WEIGHT, ZERO

from ..checkpoint.file_writer import publishing
from ..checkpoint.formats import bitnet, compressed_tensors, mlx
from ..checkpoint.formats.experts import NAMED, stacked_name, stored_name
from ..checkpoint.formats.gguf.writer import F16, PACKED, write_gguf
from ..checkpoint.formats.words import exactly, unpacked
from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import CheckpointWriter, plain_config
from ..errors import InputError, UsageError
from .gguf.metadata import gguf_metadata
from .gguf.model import gguf_notes
from .gguf.tensors import gguf_tensors
from .output import weight_bytes

GGUF_TYPES = PACKED | {"F16": F16}
TARGETS = (*(f"gguf:{name}" for name in GGUF_TYPES), "mlx", "compressed-tensors", "bitnet", "dense")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FLOATS = (torch.float16, torch.bfloat16)
_Encoded = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ExportedLayer(Event):
    """One linear layer that was packed; an event when it is written.

    Attributes:
        name, n, k: what it is. stored: the type of its tensor in the new format.
    """

    name: str
    n: int
    k: int
    stored: str


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The outcome of :func:`export`. Every weight has the value that it had.

    Attributes:
        checkpoint, out: the directory, and the directory or file written. target: one of :data:`TARGETS`.
        modules: the packed layers. notes: what the new format does not say, for the user.
        bytes_before, bytes_after: of the weight files.
        seconds: of wall time.
    """

    checkpoint: Path
    out: Path
    target: str
    modules: list[ExportedLayer]
    notes: list[str]
    bytes_before: int
    bytes_after: int
    seconds: float


@dataclass(slots=True)
class _Target:
    """A directory format: how a module is stored, and what config.json says, by the modules' own facts; ``dense``:
    packed modules that it stores as floats; ``stacks``: all experts of a layer are one module."""

    stored: str
    encode: Callable[[Quantized, str], _Encoded]
    config: Callable[[dict[str, dict[str, Any]]], dict[str, Any]] = field(default=lambda _: {})
    dense: Collection[str] = ()
    stacks: bool = False


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    to: str,
    pre: str | None = None,
    overwrite: bool = False,
    progress: ProgressCallback = silent,
) -> ExportReport:
    """Write a packed checkpoint in another format; every weight keeps its value.

    Args:
        checkpoint: a trirun checkpoint.
        out: the directory to write, or for GGUF the file.
        to: one of :data:`TARGETS`.
        pre: for GGUF, llama.cpp's name of the pattern by which the tokenizer splits text; None finds it.
        overwrite: replace ``out``.
        progress: called with ``ModuleStarted`` before and :class:`ExportedLayer` after each packed layer.

    Raises:
        UsageError: there is no such target, or ``pre`` is given for another.
        InputError: it is no checkpoint, the format has no such model or tokenizer, or ``out`` may not be written.
        QuantizationError: a weight has no exact form there; tensor, position and values are named. Nothing is written.
    """
    if to not in TARGETS:
        raise UsageError(f"--to {to}: one of {', '.join(TARGETS)}")
    if pre is not None and not to.startswith("gguf:"):
        raise UsageError(f"--pre {pre}: of gguf targets alone")
    started = time.perf_counter()
    source, out = Checkpoint(checkpoint), Path(out)
    if any(map(_EXPERT.search, source.modules)):
        _check_mixture(source, to)
    modules: list[ExportedLayer] = []

    def done(name: str, stored: str) -> None:
        modules.append(ExportedLayer(name, *source.shape(name), stored))
        progress(modules[-1])

    if to.startswith("gguf:"):
        size = _export_gguf(source, out, to, pre, overwrite, progress, done)
    else:
        _export_directory(source, out, _directory_target(source, to), overwrite, progress, done)
        size = weight_bytes(out)
    seconds = time.perf_counter() - started
    return ExportReport(source.path, out, to, modules, _notes(source, to), weight_bytes(source.path), size, seconds)


def _check_mixture(source: Checkpoint, to: str) -> None:
    """That a mixture of experts has names in the new format."""
    family = source.config.get("model_type")
    if to == "bitnet":
        fix = "--to gguf:TYPE, --to mlx, --to compressed-tensors and --to dense write mixtures"
        raise InputError(f"{source.path} is a mixture of experts, which trirun does not write as {to}", fix)
    # A GGUF file's metadata say which families.
    if not to.startswith("gguf:") and family not in NAMED:
        known = ", ".join(NAMED)
        raise InputError(f"{source.path}: the experts of {family!r} have no names that trirun knows; {known} have")


def _export_gguf(
    source: Checkpoint,
    out: Path,
    to: str,
    pre: str | None,
    overwrite: bool,
    progress: ProgressCallback,
    done: Callable[[str, str], None],
) -> int:
    """Bytes of the file written."""
    kind, total, count = GGUF_TYPES[to.removeprefix("gguf:")], len(source.modules), 0

    def starting(name: str) -> None:
        nonlocal count
        progress(ModuleStarted(count, total, name))
        count += 1

    metadata = gguf_metadata(source, kind, pre)
    tensors = list(gguf_tensors(source, kind, starting, lambda name, stored: done(name, stored.name)))
    with publishing(out, overwrite=overwrite) as partial:
        write_gguf(partial, metadata, tensors)
    return out.stat().st_size


def _export_directory(
    source: Checkpoint,
    out: Path,
    target: _Target,
    overwrite: bool,
    progress: ProgressCallback,
    done: Callable[[str, str], None],
) -> None:
    facts: dict[str, dict[str, Any]] = {}
    count = 0
    with CheckpointWriter(out, source, overwrite=overwrite) as writer:
        for stored, modules in _stored_modules(source, target).items():
            encoded: list[dict[str, Tensor]] = []
            for module in modules:
                progress(ModuleStarted(count, len(source.modules), module))
                count += 1
                weight = unpacked(source.packed(module))
                if module in target.dense:
                    writer.add(stored + WEIGHT, exactly(weight.dequantize(), _FLOATS, module))
                    continue
                tensors, own = target.encode(weight, module)
                if facts.setdefault(stored, own) != own or source.shape(module) != source.shape(modules[0]):
                    raise InputError(f"{source.path}: {module} is {own}, experts before it are of another kind or size")
                encoded.append(tensors)
                done(module, target.stored)
            for suffix in encoded[0] if encoded else ():
                parts = [tensors[suffix] for tensors in encoded]
                stacked = target.stacks and stored != modules[0]
                writer.add(stored + suffix, torch.stack(parts) if stacked else parts[0])
        for name, tensor in _plain_tensors(source):
            writer.add(name, tensor)
        writer.finish_as(plain_config(source.config) | target.config(facts))


def _stored_modules(source: Checkpoint, target: _Target) -> dict[str, list[str]]:
    """The new format's names of the packed modules, and which each holds: one, or in order those of all experts.

    Raises:
        InputError: some of a layer's experts are packed, others not.
    """
    family = str(source.config.get("model_type"))
    if not target.stacks:
        return {stored_name(module, family): [module] for module in source.modules}
    held: dict[str, dict[int, str]] = {}
    for module in source.modules:
        stack = stacked_name(module, family)
        held.setdefault(stack or module, {})[int(module.split(".")[-2]) if stack else 0] = module
    for name in source.names:
        module = name.removesuffix(WEIGHT)
        if (stack := stacked_name(module, family)) in held and module not in held[stack].values():
            raise InputError(f"{source.path}: {module} is not packed as the layer's other experts are")
    return {stored: [modules[number] for number in sorted(modules)] for stored, modules in held.items()}


def _plain_tensors(source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """What the checkpoint holds unpacked, biases of packed layers included."""
    packed = {module + end for module in source.modules for end in (WEIGHT, SCALE, ZERO)}
    for name in source.names:
        if name not in packed:
            yield name, source.tensor(name)


def _directory_target(source: Checkpoint, to: str) -> _Target:
    """How a directory format stores this checkpoint."""
    own_type = {"dtype": _kind(_dtype(source, unpacks=to == "dense"))}
    # Their readers take linear layers, and the head by way of exception.
    floats = {*source.format.embeddings, HEAD_MODULE} & set(source.modules)
    kept = sorted({*source.format.modules_to_not_convert, *floats - set(source.format.embeddings)})
    if to == "dense":
        dtype = getattr(torch, own_type["dtype"])

        def dense(weight: Quantized, name: str) -> _Encoded:
            return {WEIGHT: exactly(weight.dequantize(), (dtype,), name)}, {}

        return _Target(own_type["dtype"], dense, lambda _: own_type)
    if to == "bitnet":
        return _Target(
            "uint8",
            lambda weight, name: (bitnet.write(weight, name), {}),
            lambda _: own_type | {"quantization_config": bitnet.section(kept)},
            floats,
        )
    if to == "mlx":
        return _Target("uint32", mlx.write, lambda facts: own_type | mlx.section(facts, source.config), stacks=True)
    return _Target(
        "int32",
        compressed_tensors.write,
        lambda facts: own_type | {"quantization_config": compressed_tensors.section(facts, kept)},
        floats,
    )


def _dtype(source: Checkpoint, *, unpacks: bool) -> torch.dtype:
    """A type for config.json, to which the readers of the new directory convert what they load: the first of the
    model's own, float16 and float32 that changes no value.

    Raises:
        QuantizationError: float32 changes one.
    """
    stated = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float16").removeprefix("torch.")
    own = getattr(torch, stated, None)
    candidates = [own] if own in (torch.float16, torch.bfloat16) else []
    candidates += [dtype for dtype in (torch.float16, torch.float32) if dtype not in candidates]
    for name, tensor in _dense_values(source, unpacks):
        kept = [dtype for dtype in candidates if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)]
        if not kept:
            exactly(tensor.float(), candidates, name)
        candidates = kept
    return candidates[0]


def _dense_values(source: Checkpoint, unpacks: bool) -> Iterator[tuple[str, Tensor]]:
    """The values that a reader holds as floats: unpacked tensors, and the packed weights or their scales."""
    for name, tensor in _plain_tensors(source):
        if tensor.is_floating_point():
            yield name, tensor
    for module in source.modules:
        weight = unpacked(source.packed(module))
        yield module, weight.dequantize() if unpacks else weight.scales


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(source: Checkpoint, to: str) -> list[str]:
    """What another program will do differently."""
    bits, notes = source.format.activation_bits, gguf_notes(source) if to.startswith("gguf:") else []
    if bits == 8 and to != "bitnet":
        notes.append("the model was trained with int8 activations; the new format does not say so")
    if bits == 16 and to == "bitnet":
        notes.append("transformers runs this format with int8 activations; the checkpoint has 16-bit ones")
    return notes
