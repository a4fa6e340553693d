"""Foreign formats: models whose linear layers another tool has quantized and packed. One file each.

A format's file states its layout as a formula, says what its config means (``open``), turns a module's tensors into
codes and scales (``read``) and, where trirun exports to it, back (``write``). What formats of 32-bit words share is in
:mod:`~trirun_cli.checkpoint.formats.words`. To add one: write the class, and name it in :func:`open_foreign`.
GGUF is a single file, which :func:`open_source` opens in the place of a directory (:mod:`.gguf`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import InputError
from ..model_dir import MLX_SECTION, ModelDir, ModelSource
from .experts import own_name

if TYPE_CHECKING:
    from torch import Tensor
    from trirun_gptq.layer.quantized import Quantized

GGUF = ".gguf"
# What a directory of rotated weights holds beside them.
ROTATION = "hadamard.json"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


class ForeignWeights(Protocol):
    """The packed modules of a model in a foreign format.

    Attributes:
        activation_bits: 8 or 16, what its models are trained to run with.
    """

    @property
    def activation_bits(self) -> int: ...

    def packed(self, tensor_name: str) -> str | None:
        """The module that a stored tensor is a packed part of; None for a tensor that is not packed."""

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scales to fp16: 0 where it is exact.

        Raises:
            TensorFileError: a tensor is missing. QuantizationError: it is not what the format says.
        """

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k] that the format defines, with its scales as they are stored."""


@dataclass(frozen=True, slots=True)
class _NamedExperts:
    """Packed modules, experts among them by trirun's names; see :class:`ForeignWeights`.

    Attributes:
        foreign: the same by the names of the program that packed them. stored: module to that name, where they differ.
    """

    foreign: ForeignWeights
    stored: dict[str, str]

    @property
    def activation_bits(self) -> int:
        """See :class:`ForeignWeights`."""
        return self.foreign.activation_bits

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`ForeignWeights`."""
        module = self.foreign.packed(tensor_name)
        return None if module is None else own_name(module)

    def read(self, module: str) -> tuple[Quantized, float]:
        """See :class:`ForeignWeights`."""
        return self.foreign.read(self.stored.get(module, module))

    def dense(self, module: str) -> Tensor:
        """See :class:`ForeignWeights`."""
        return self.foreign.dense(self.stored.get(module, module))


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a directory without a config.json; None where it
    means a model directory.

    Raises:
        InputError: there are several.
    """
    if path.suffix == GGUF and not path.is_dir():
        return path
    if (path / "config.json").exists() or not path.is_dir():
        return None
    # Of a model in parts, the first stands for all.
    found = sorted(file for file in path.glob(f"*{GGUF}") if not _LATER_PART.search(file.name))
    if len(found) > 1:
        raise InputError(f"{path} has {len(found)} GGUF files: {', '.join(file.name for file in found)}", "name one")
    return found[0] if found else None


def open_source(path: str | Path) -> ModelSource:
    """A model by its directory, or by a GGUF file, or a directory that holds one.

    Raises:
        InputError: it is none, or damaged, or of a variant that trirun does not read.
    """
    file = gguf_file(Path(path))
    if file is None:
        found = ModelDir(path)
        if MLX_SECTION not in found.config:
            return found
        from .mlx import MlxDir

        return MlxDir(path)
    from .gguf.source import GgufModel

    return GgufModel(file)


def open_foreign(source: ModelSource) -> ForeignWeights | None:
    """The packed modules of a model in a foreign format; None where it is in none that trirun reads.

    Raises:
        InputError: a variant of a known format that trirun does not read.
    """
    if not isinstance(source, ModelDir):
        from .gguf.source import GgufModel

        return source.foreign if isinstance(source, GgufModel) else None
    try:
        foreign = _packed_directory(source)
    # The sections have objects in objects, and each entry is used where it is read.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise InputError(f"{source.path}: config.json says senseless things of how it is packed ({kind})") from error
    owners = {module for name in source if foreign is not None and (module := foreign.packed(name))}
    renamed = {own: module for module in owners if (own := own_name(module)) != module}
    return _NamedExperts(foreign, renamed) if foreign is not None and renamed else foreign


def _packed_directory(source: ModelDir) -> ForeignWeights | None:
    """The packed modules of a directory, by their own names."""
    method = source.quant_method
    if str(source.config.get("model_type")).startswith("prism_hadamard") or (source.path / ROTATION).is_file():
        raise InputError(f"{source.path}: its weights are rotated ({ROTATION}), which trirun does not undo")
    if MLX_SECTION in source.config or (method == "None" and "bits" in source.config["quantization_config"]):
        from .mlx import MlxWeights

        return MlxWeights.of(source)
    if method == "bitnet":
        from .bitnet import BitNetWeights

        return BitNetWeights.of(source)
    if method == "compressed-tensors":
        from .compressed_tensors import CompressedTensorsWeights

        return CompressedTensorsWeights.of(source)
    if method == "humming":
        from .humming import HummingWeights

        return HummingWeights.of(source)
    if method in ("gptq", "gptq_v2", "auto-round"):
        from .gptq import GptqWeights

        return GptqWeights.of(source)
    return None
