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

from ..checkpoint.formats import ForeignWeights, open_foreign
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError
from ..version import __version__
from .output import weight_bytes


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

    Weights that lie packed in the model directory already (BitNet's format) keep their codes; their one scale per
    matrix is rounded to fp16 where it does not fit.

    Args:
        model: a Hugging Face directory. out: the checkpoint to write.
        keep: pattern (``re.search`` on the module name) of linear layers to leave as they are.
        activation_bits: recorded as the checkpoint's default; 8 for models trained with int8 activations. None is 8 for
            BitNet's format and 16 otherwise.
        overwrite: replace a non-empty ``out``.
        progress: called with ``ModuleStarted`` before and :class:`PackedLayer` after each layer.

    Raises:
        InputError: the directory is quantized in another format, or nothing in it is left to pack.
        UsageError: ``activation_bits`` is neither 8 nor 16; ``keep`` is no regular expression, matches no layer, or
            names layers that are packed already.
        QuantizationError: a weight is not ternary; the message names the worst offender. Nothing is written.
    """
    started = time.perf_counter()
    if activation_bits not in (None, 8, 16):
        raise UsageError(f"--act-bits {activation_bits}: 8 or 16")
    try:
        kept = re.compile("(?!)" if keep is None else keep)
    except re.error as error:
        raise UsageError(f"--keep {keep}: not a regular expression: {error}") from None
    model, out = Path(model), Path(out)
    source = ModelDir(model)
    foreign = open_foreign(source)
    if source.quant_method is not None and foreign is None:
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    head = skeleton.get_output_embeddings()
    modules = {name: skeleton.get_submodule(name) for name in linears}
    chosen = {n for n, module in modules.items() if multiplies(module) and module is not head and not kept.search(n)}
    if foreign is not None:
        chosen -= foreign.kept
        if keep is not None:
            raise UsageError(f"--keep {keep}: the layers of {model} are stored packed and cannot be kept as they are")
    if keep is not None and not any(map(kept.search, linears)):
        raise UsageError(f"--keep {keep}: matches none of the {len(linears)} linear layers")
    if not chosen:
        raise InputError(f"{model} has no linear layer to pack")

    packed: list[PackedLayer] = []
    with CheckpointWriter(out, source, overwrite=overwrite) as writer:
        stored, replaced = StoredNames(skeleton, source), {name + WEIGHT for name in chosen}
        for group in stored.groups:
            for name in (target.removesuffix(WEIGHT) for target in group.targets if target in replaced):
                progress(ModuleStarted(len(packed), len(chosen), name))
                packed.append(_pack_module(writer, name, stored.read(name + WEIGHT), foreign, linears[name]))
                progress(packed[-1])
            for tensor_name, tensor in unquantized(stored, group, replaced):
                if foreign is None or not any(tensor_name.removesuffix(end) in chosen for end in foreign.suffixes):
                    writer.add(tensor_name, tensor)
        missing = chosen - {layer.name for layer in packed}
        if missing:
            raise InputError(f"{model}: there is no tensor {min(missing)}{WEIGHT}")
        recipe: dict[str, Any] = {"trirun": __version__, "command": "pack", "model": str(model), "keep": keep}
        bits = activation_bits or (16 if foreign is None else foreign.activation_bits)
        writer.finish(packed, linears, recipe, bits)
    seconds = time.perf_counter() - started
    return PackReport(model, out, packed, bits, weight_bytes(model), weight_bytes(out), seconds)


def _pack_module(
    writer: CheckpointWriter, name: str, weight: Tensor, foreign: ForeignWeights | None, shape: tuple[int, int]
) -> PackedLayer:
    ternary, error = (ternarize(weight, name), 0.0) if foreign is None else foreign.read(name)
    if tuple(ternary.codes.shape) != shape:
        found = list(ternary.codes.shape)
        raise InputError(f"{name}{WEIGHT} has shape {found}, the model's config says {list(shape)}")
    packed = ternary.pack()
    expected = weight if foreign is None else ternary.dequantize(torch.float32)
    if not torch.equal(dequantize(packed, expected.dtype), expected):
        raise QuantizationError(f"{name} does not decode to its source after packing")
    writer.add_packed(name, packed)
    zeros = float((ternary.codes == 1).float().mean())
    structure = scale_structure(ternary)
    return PackedLayer(name, *shape, ternary.spec, structure, error == 0, error, zeros, weight.nbytes, packed.nbytes)
