"""``trirun pack`` for programs: a model whose linear weights are ternary already, packed without loss."""

from __future__ import annotations

import re
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.lossless.ternary import scale_structure, ternarize
from trirun_gptq.model.loader import kind_of, multiplies
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.model.mxfp4 import QUANT_METHOD as MXFP4
from trirun_gptq.model.stored import StoredNames
from trirun_gptq.model.writer import unquantized
from trirun_gptq.patterns import matches
from trirun_gptq.run.progress import Event, ModuleStarted, ProgressCallback, silent
from trirun_kernels import QuantSpec
from trirun_kernels.weights.names import WEIGHT

from ..checkpoint.formats import ForeignWeights, open_foreign, open_source
from ..checkpoint.formats.words import exactly
from ..checkpoint.model_dir import ModelSource
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError
from ..version import __version__
from .kept import KeptMatrix, kept_matrices
from .output import matrix_kinds, model_origin, weight_bytes

# Of an embedding or a head, to see whether it is ternary.
SAMPLED_ROWS = 64
# What to do about a layer that is not ternary: the first one, and one after some that are.
QUANTIZE = "trirun quantize makes a model 2-bit; pack is for those that are ternary already"
KEEP = "--keep REGEX packs the others and leaves the layers it matches as they are"


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
        kept: the matrices that are stored as floats.
        activation_bits: the checkpoint's default.
        bytes_before, bytes_after: of the weight files of model and checkpoint.
        seconds: of wall time.
    """

    model: Path
    out: Path
    modules: list[PackedLayer]
    kept: list[KeptMatrix]
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
    """Pack every linear layer, proving each decodes to its source; and the embedding and the output head where they
    can be packed without loss, which many ternary models leave in 16 bits.

    Weights that lie packed in the model directory already keep their codes, whatever the format
    (:mod:`trirun_cli.checkpoint.formats`); a scale that fp16 does not hold is rounded, and the error reported.

    Args:
        model: a Hugging Face directory, a GGUF file, or a directory that holds one. out: the checkpoint to write.
        keep: pattern (``re.search`` on the module name) of layers to leave as they are.
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
        re.compile(keep or "")
    except re.error as error:
        raise UsageError(f"--keep {keep}: not a regular expression: {error}") from None

    def is_kept(name: str) -> bool:
        return keep is not None and matches(keep, name)

    model, out = Path(model), Path(out)
    source = open_source(model)
    foreign = open_foreign(source)
    if source.quant_method is not None and foreign is None:
        fix = QUANTIZE if source.quant_method == MXFP4 else None
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})", fix)
    skeleton = meta_model(source.path)
    linears, vocabulary = linear_modules(skeleton), vocabulary_modules(skeleton)
    modules = {name: skeleton.get_submodule(name) for name in linears}
    chosen = {n for n, module in modules.items() if multiplies(module) and n not in vocabulary and not is_kept(n)}
    if foreign is not None and keep is not None:
        raise UsageError(f"--keep {keep}: the layers of {model} are stored packed and cannot be kept as they are")
    if keep is not None and not any(is_kept(name) for name, module in skeleton.named_modules() if kind_of(module)):
        raise UsageError(f"--keep {keep}: matches none of the model's modules")
    if not chosen:
        raise InputError(f"{model} has no linear layer to pack{matrix_kinds(skeleton)}")

    stored = None if foreign is not None else StoredNames(skeleton, source)
    parts = {} if foreign is None else _parts(source, foreign)
    there = source if stored is None else stored
    if absent := {name for name in chosen - parts.keys() if name + WEIGHT not in there}:
        raise InputError(f"{model}: there is no tensor {min(absent)}{WEIGHT}")
    if foreign is not None:
        # What a foreign format leaves dense stays so.
        chosen &= parts.keys()
        if not chosen:
            raise InputError(f"{model} has no packed linear layer")
    optional = {name for name in vocabulary if not is_kept(name)}
    before = sum(file.stat().st_size for file in source.files)
    with CheckpointWriter(out, source, overwrite=overwrite) as writer:
        packing = _Packing(writer, linears | vocabulary, chosen, optional, _renamed(source, there, skeleton), progress)
        if stored is not None:
            _pack_floats(packing, stored)
        elif foreign is not None:
            _pack_codes(packing, source, foreign, parts)
        recipe: dict[str, Any] = {"trirun": __version__, "command": "pack", "model": model_origin(model), "keep": keep}
        bits = activation_bits or (16 if foreign is None else foreign.activation_bits)
        writer.finish(packing.layers, linears, recipe, bits)
    left = kept_matrices(out, source, linears, vocabulary, keep, foreign=foreign is not None)
    return PackReport(model, out, packing.layers, left, bits, before, weight_bytes(out), time.perf_counter() - started)


@dataclass(slots=True)
class _Packing:
    """What is packed into ``writer``, and ``layers``, those that are.

    Attributes:
        sizes: (n, k) by name. chosen: what must be packed. optional: what is packed where that is exact.
        renamed: by what other name a module is stored once it is packed.
    """

    writer: CheckpointWriter
    sizes: dict[str, tuple[int, int]]
    chosen: set[str]
    optional: set[str]
    renamed: dict[str, str]
    progress: ProgressCallback
    layers: list[PackedLayer] = field(default_factory=list)

    def begin(self, name: str) -> None:
        self.progress(ModuleStarted(len(self.layers), len(self.chosen | self.optional), name))

    def add(self, name: str, ternary: Quantized, error: float, source_bytes: int) -> None:
        """Pack a layer; :meth:`Quantized.pack` proves that codes, scales and zeros come back bit for bit."""
        name, shape = self.renamed.get(name, name), self.sizes[name]
        if tuple(ternary.codes.shape) != shape:
            found = list(ternary.codes.shape)
            raise InputError(f"{name}{WEIGHT} has shape {found}, the model's config says {list(shape)}")
        packed = ternary.pack()
        self.writer.add_packed(name, packed)
        zeros = int(torch.count_nonzero(ternary.codes == 1)) / ternary.codes.numel()
        structure = scale_structure(ternary)
        self.layers.append(
            PackedLayer(name, *shape, ternary.spec, structure, error == 0, error, zeros, source_bytes, packed.nbytes)
        )
        self.progress(self.layers[-1])


def _pack_floats(packing: _Packing, stored: StoredNames) -> None:
    """A model whose weights are floats."""
    tried = {name + WEIGHT for name in packing.chosen | packing.optional}
    replaced: set[str] = set()
    for group in stored.groups:
        for name in (target.removesuffix(WEIGHT) for target in group.targets if target in tried):
            packing.begin(name)
            weight = stored.read(name + WEIGHT)
            try:
                if name in packing.optional:
                    # A few rows show that most embeddings are not ternary.
                    ternarize(weight[:SAMPLED_ROWS], name)
                ternary = ternarize(weight, name)
            except QuantizationError as refused:
                if name in packing.optional:
                    continue
                some = any(layer.name not in packing.optional for layer in packing.layers)
                raise InputError(str(refused), KEEP if some else QUANTIZE) from refused
            packing.add(name, ternary, 0.0, weight.nbytes)
            replaced.add(name + WEIGHT)
        for tensor_name, tensor in unquantized(stored, group, replaced):
            packing.writer.add(tensor_name, tensor)


def _pack_codes(packing: _Packing, source: ModelSource, foreign: ForeignWeights, parts: dict[str, list[str]]) -> None:
    """A model that another tool has packed; ``parts``: the stored tensors of its packed modules."""
    taken = {tensor_name for names in parts.values() for tensor_name in names}
    for tensor_name in source.names:
        if tensor_name not in taken:
            packing.writer.add(tensor_name, source.tensor(tensor_name))
    for name, names in parts.items():
        packing.begin(name)
        size = sum(source[tensor_name].nbytes for tensor_name in names)
        if name in packing.chosen:
            packing.add(name, *foreign.read(name), size)
        elif name in packing.optional and (exact := _exact_codes(foreign, name)):
            packing.add(name, exact, 0.0, size)
        else:
            # In a type that holds every value.
            packing.writer.add(name + WEIGHT, exactly(foreign.dense(name), (torch.float16, torch.bfloat16), name))


def _exact_codes(foreign: ForeignWeights, name: str) -> Quantized | None:
    """A weight's codes and scales, where they are on a grid of trirun's and fp16 holds the scales."""
    try:
        codes, error = foreign.read(name)
    except QuantizationError:
        return None
    return None if error else codes


def vocabulary_modules(skeleton: Any) -> dict[str, tuple[int, int]]:
    """The embedding and the output head of a model of transformers by name, with their (vocabulary, hidden size); an
    embedding that does more than look rows up is left out."""
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    return {
        name: (module.weight.shape[0], module.weight.shape[1])
        for name, module in skeleton.named_modules()
        if (module is embedding and type(module) is nn.Embedding) or (module is head and multiplies(module))
    }


def _renamed(source: ModelSource, there: Container[str], skeleton: Any) -> dict[str, str]:
    """A head that is the embedding too is stored by the name of the embedding, where packed ones are looked for."""
    names = {module: name for name, module in skeleton.named_modules()}
    embedding, head = names.get(skeleton.get_input_embeddings()), names.get(skeleton.get_output_embeddings())
    if not embedding or not head or embedding + WEIGHT in there or not source.config.get("tie_word_embeddings"):
        return {}
    return {head: embedding}


def _parts(source: ModelSource, foreign: ForeignWeights) -> dict[str, list[str]]:
    """The stored tensors of each module that is packed, in the order of the files."""
    parts: dict[str, list[str]] = {}
    for tensor_name in source.names:
        if owner := foreign.packed(tensor_name):
            parts.setdefault(owner, []).append(tensor_name)
    return parts
