"""Foreign formats: models whose linear layers another tool has quantized and packed. One file each.

A format's file states its layout as a formula, says what its config means (``open``), turns a module's tensors into
codes and scales (``read``) and, where trirun exports to it, back (``write``). What formats of 32-bit words share is in
:mod:`~trirun_cli.checkpoint.formats.words`. To add one: write the class, and name it in :func:`open_foreign`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ...errors import InputError
from ..model_dir import ModelDir

if TYPE_CHECKING:
    from torch import Tensor
    from trirun_gptq.layer.quantized import Quantized


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


def open_foreign(source: ModelDir) -> ForeignWeights | None:
    """The packed modules of a model in a foreign format; None where it is in none that trirun reads.

    Raises:
        InputError: a variant of a known format that trirun does not read.
    """
    method = source.quant_method
    if str(source.config.get("model_type")).startswith("prism_hadamard") or (source.path / "hadamard.json").is_file():
        raise InputError(f"{source.path}: its weights are rotated (hadamard.json), which trirun does not undo")
    if "quantization" in source.config or (method == "None" and "bits" in source.config["quantization_config"]):
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
