"""``trirun pack`` for programs: a model whose linear weights are ternary already, packed without loss."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.lossless.ternary import scale_structure, ternarize
from trirun_gptq.model.loader import multiplies
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.model.stored import StoredNames
from trirun_gptq.model.writer import unquantized
from trirun_gptq.run.progress import Event, ModuleStarted, ProgressCallback, silent
from trirun_kernels import QuantSpec, dequantize
from trirun_kernels.weights.names import WEIGHT

from ..checkpoint.formats import ForeignWeights, open_foreign, open_source
from ..checkpoint.formats.words import exactly
from ..checkpoint.model_dir import ModelSource
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError
from ..version import __version__
from .output import matrix_kinds, model_origin, weight_bytes


@dataclass(frozen=True, slots=True)
class PackedLayer(Event):
    """One packed linear layer; an event when it is packed.

    Attributes:
        name, n, k, spec: what it is. structure: what one scale covers: "tensor", "row", or a number of columns.
        exact: the packed weight decodes to the source bit for bit.
        scale_error: relative error of a scale that was rounded to fp16; 0 where the weight is exact.
        zeros: fraction of weights that are 0. source_bytes, packed_bytes: stored size before and after.
    """

    name: str
    n: int
    k: int
    spec: QuantSpec
    structure: str
    exact: bool
    scale_error: float
    zeros: float
    source_bytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class PackReport:
    """The outcome of :func:`pack`.

    Attributes:
        model, out: the two directories. modules: the packed layers, in the order of the files.
        activation_bits: the checkpoint's default.
        bytes_before, bytes_after: of the weight files of model and checkpoint.
        seconds: of wall time.
    """

    model: Path
    out: Path
    modules: list[PackedLayer]
    activation_bits: int
    bytes_before: int
    bytes_after: int
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether every layer decodes to its source bit for bit."""
        return all(module.exact for module in self.modules)

    @property
    def scale_error(self) -> float:
        """The largest relative error of a scale that was rounded to fp16; 0 where all layers are exact."""
        return max(module.scale_error for module in self.modules)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of each packed weight, scales included."""
        weights = sum(module.n * module.k for module in self.modules)
        return sum(module.n * module.k * module.spec.bits_per_weight(module.k) for module in self.modules) / weights


def pack(
    model: str | Path,
    out: str | Path,
    *,
    keep: str | None = None,
    activation_bits: int | None = None,
    overwrite: bool = False,
    progress: ProgressCallback = silent,
) -> PackReport:
    """Pack every linear layer but the output head, proving each decodes to its source.

    Weights that lie packed in the model directory already keep their codes, whatever the format
    (:mod:`trirun_cli.checkpoint.formats`); a scale that fp16 does not hold is rounded, and the error reported. Packed
    embeddings and heads become dense fp16, exactly.

    Args:
        model: a Hugging Face directory, a GGUF file, or a directory that holds one. out: the checkpoint to write.
        keep: pattern (``re.search`` on the module name) of linear layers to leave as they are.
        activation_bits: recorded as the checkpoint's default; 8 for models trained with int8 activations. None is 8 for
            BitNet's format and 16 otherwise.
        overwrite: replace a non-empty ``out``.
        progress: called with ``ModuleStarted`` before and :class:`PackedLayer` after each layer.

    Raises:
        InputError: the directory is quantized in a format that trirun does not read, nothing in it is left to pack, or
            a weight is not ternary; the message names the worst offender. Nothing is written.
        UsageError: ``activation_bits`` is neither 8 nor 16; ``keep`` is no regular expression, matches no layer, or
            names layers that are packed already.
        QuantizationError: a packed weight does not decode to its source. Nothing is written.
    """
    started = time.perf_counter()
    if activation_bits not in (None, 8, 16):
        raise UsageError(f"--act-bits {activation_bits}: 8 or 16")
    try:
        kept = re.compile("(?!)" if keep is None else keep)
    except re.error as error:
        raise UsageError(f"--keep {keep}: not a regular expression: {error}") from None
    model, out = Path(model), Path(out)
    source = open_source(model)
    foreign = open_foreign(source)
    if source.quant_method is not None and foreign is None:
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    head = skeleton.get_output_embeddings()
    modules = {name: skeleton.get_submodule(name) for name in linears}
    chosen = {n for n, module in modules.items() if multiplies(module) and module is not head and not kept.search(n)}
    if foreign is not None and keep is not None:
        raise UsageError(f"--keep {keep}: the layers of {model} are stored packed and cannot be kept as they are")
    if keep is not None and not any(map(kept.search, linears)):
        raise UsageError(f"--keep {keep}: matches none of the {len(linears)} linear layers")
    if not chosen:
        raise InputError(f"{model} has no linear layer to pack{matrix_kinds(skeleton)}")

    stored = StoredNames(skeleton, source)
    parts = {} if foreign is None else _parts(source, foreign)
    if absent := {n for n in chosen - parts.keys() if n + WEIGHT not in (stored if foreign is None else source)}:
        raise InputError(f"{model}: there is no tensor {min(absent)}{WEIGHT}")
    if foreign is not None:
        # What a foreign format leaves dense stays so.
        chosen &= parts.keys()
    if not chosen:
        raise InputError(f"{model} has no packed linear layer")

    packed: list[PackedLayer] = []
    with CheckpointWriter(out, source, overwrite=overwrite) as writer:
        replaced = {name + WEIGHT for name in chosen}
        for group in stored.groups if foreign is None else ():
            for name in (target.removesuffix(WEIGHT) for target in group.targets if target in replaced):
                progress(ModuleStarted(len(packed), len(chosen), name))
                weight = stored.read(name + WEIGHT)
                packed.append(_pack_module(writer, name, weight, None, linears[name], weight.nbytes))
                progress(packed[-1])
            for tensor_name, tensor in unquantized(stored, group, replaced):
                writer.add(tensor_name, tensor)
        taken = {tensor_name for names in parts.values() for tensor_name in names}
        for tensor_name in source.names if foreign is not None else ():
            if tensor_name not in taken:
                writer.add(tensor_name, source.tensor(tensor_name))
        for name, names in parts.items() if foreign is not None else ():
            if name in chosen:
                progress(ModuleStarted(len(packed), len(chosen), name))
                size = sum(source[tensor_name].nbytes for tensor_name in names)
                packed.append(_pack_module(writer, name, None, foreign, linears[name], size))
                progress(packed[-1])
            elif foreign is not None:
                # Embeddings and the head are stored dense, in a type that holds every value.
                writer.add(name + WEIGHT, exactly(foreign.dense(name), (torch.float16, torch.bfloat16), name))
        recipe: dict[str, Any] = {"trirun": __version__, "command": "pack", "model": model_origin(model), "keep": keep}
        bits = activation_bits or (16 if foreign is None else foreign.activation_bits)
        writer.finish(packed, linears, recipe, bits)
    seconds = time.perf_counter() - started
    before = sum(file.stat().st_size for file in source.files)
    return PackReport(model, out, packed, bits, before, weight_bytes(out), seconds)


def _parts(source: ModelSource, foreign: ForeignWeights) -> dict[str, list[str]]:
    """The stored tensors of each module that is packed, in the order of the files."""
    parts: dict[str, list[str]] = {}
    for tensor_name in source.names:
        if owner := foreign.packed(tensor_name):
            parts.setdefault(owner, []).append(tensor_name)
    return parts


def _pack_module(
    writer: CheckpointWriter,
    name: str,
    weight: Tensor | None,
    foreign: ForeignWeights | None,
    shape: tuple[int, int],
    source_bytes: int,
) -> PackedLayer:
    if foreign is not None:
        ternary, error = foreign.read(name)
        weight = ternary.dequantize(torch.float32)
    else:
        assert weight is not None
        try:
            ternary, error = ternarize(weight, name), 0.0
        except QuantizationError as refused:
            fix = "trirun quantize makes a model 2-bit; pack is for those that are ternary already"
            raise InputError(str(refused), fix) from refused
    if tuple(ternary.codes.shape) != shape:
        found = list(ternary.codes.shape)
        raise InputError(f"{name}{WEIGHT} has shape {found}, the model's config says {list(shape)}")
    packed = ternary.pack()
    if not torch.equal(dequantize(packed, weight.dtype), weight):
        raise QuantizationError(f"{name} does not decode to its source after packing")
    writer.add_packed(name, packed)
    zeros = float((ternary.codes == 1).float().mean())
    structure = scale_structure(ternary)
    return PackedLayer(name, *shape, ternary.spec, structure, error == 0, error, zeros, source_bytes, packed.nbytes)
