"""Lossless packing of a model whose linear weights are ternary already."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.lossless.ternary import scale_structure, ternarize
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_kernels import QuantSpec, dequantize
from trirun_kernels.weights.names import WEIGHT

from .. import __version__
from ..checkpoint.formats import ForeignWeights, open_foreign
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError


@dataclass(frozen=True, slots=True)
class PackedReport:
    """One packed module.

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


def pack_model(
    model: str | Path,
    out: str | Path,
    *,
    keep: str | None = None,
    activation_bits: int | None = None,
    overwrite: bool = False,
    on_module: Callable[[int, str], None] = lambda total, name: None,
) -> list[PackedReport]:
    """Pack every linear layer but the output head, proving each decodes to its source.

    Weights that lie packed in the model directory already (BitNet's format) keep their codes; their one scale per
    matrix is rounded to fp16 where it does not fit.

    Args:
        model: a Hugging Face directory. out: the checkpoint to write.
        keep: pattern (``re.search`` on the module name) of linear layers to leave as they are.
        activation_bits: recorded as the checkpoint's default; 8 for models trained with int8 activations. None is 8 for
            BitNet's format and 16 otherwise.
        overwrite: replace a non-empty ``out``.
        on_module: called with the number of modules and the name of the next one.

    Raises:
        InputError: the directory is quantized in another format, or nothing in it is left to pack.
        UsageError: ``keep`` is no regular expression, matches no layer, or names layers that are packed already.
        QuantizationError: a weight is not ternary; the message names the worst offender. Nothing is written.
    """
    try:
        kept = re.compile("(?!)" if keep is None else keep)
    except re.error as error:
        raise UsageError(f"--keep {keep}: not a regular expression: {error}") from None
    source = ModelDir(model)
    foreign = open_foreign(source)
    if source.quant_method is not None and foreign is None:
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    head = skeleton.get_output_embeddings()
    chosen = {name for name in linears if skeleton.get_submodule(name) is not head and not kept.search(name)}
    if foreign is not None:
        chosen -= foreign.kept
        if keep is not None:
            raise UsageError(f"--keep {keep}: the layers of {model} are stored packed and cannot be kept as they are")
    if keep is not None and not any(map(kept.search, linears)):
        raise UsageError(f"--keep {keep}: matches none of the {len(linears)} linear layers")
    if not chosen:
        raise InputError(f"{model} has no linear layer to pack")

    reports = []
    with CheckpointWriter(out, source, overwrite=overwrite) as writer:
        for tensor_name in source.names:
            name = tensor_name.removesuffix(WEIGHT)
            if name in chosen and tensor_name.endswith(WEIGHT):
                on_module(len(chosen), name)
                reports.append(_pack_module(writer, name, source, foreign, linears[name]))
            elif foreign is None or not any(tensor_name.removesuffix(end) in chosen for end in foreign.suffixes):
                writer.add(tensor_name, source.tensor(tensor_name))
        missing = chosen - {report.name for report in reports}
        if missing:
            raise InputError(f"{model}: there is no tensor {min(missing)}{WEIGHT}")
        recipe: dict[str, Any] = {"trirun": __version__, "command": "pack", "model": str(model), "keep": keep}
        writer.finish(reports, linears, recipe, activation_bits or (16 if foreign is None else foreign.activation_bits))
    return reports


def _pack_module(
    writer: CheckpointWriter, name: str, source: ModelDir, foreign: ForeignWeights | None, shape: tuple[int, int]
) -> PackedReport:
    weight = source.tensor(name + WEIGHT)
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
    return PackedReport(name, *shape, ternary.spec, structure, error == 0, error, zeros, weight.nbytes, packed.nbytes)
