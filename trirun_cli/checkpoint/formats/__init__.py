"""Foreign formats: models whose linear layers another tool has quantized and packed. One file each.

A format here is what a *directory* says: whether it is of the format, which tensors belong to a layer, what its config
means. The arithmetic from those tensors to codes and scales is torch code without files, in
``trirun_gptq/lossless/<format>.py``. To add one: write both, and name the class in :func:`open_foreign`. MLX and GPTQ
are directories with a ``quantization_config`` like BitNet. GGUF is a single file; it needs a reader of tensors beside
:class:`~trirun_kernels.weights.safetensors_dir.SafetensorsDir` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..model_dir import ModelDir

if TYPE_CHECKING:
    from torch import Tensor
    from trirun_gptq.layer.quantized import Quantized


class ForeignWeights(Protocol):
    """The packed linear layers of a model in a foreign format.

    Attributes:
        activation_bits: 8 or 16, what its models are trained to run with.
        kept: linear modules that the model holds unpacked.
        suffixes: what the names of a packed module's tensors end with, after the module's own.
    """

    @property
    def activation_bits(self) -> int: ...
    @property
    def kept(self) -> frozenset[str]: ...
    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scales to fp16: 0 where it is exact.

        Raises:
            TensorFileError: a tensor is missing. QuantizationError: it is not what the format says.
        """

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k] that the format defines, with its scales as they are stored."""


def open_foreign(source: ModelDir) -> ForeignWeights | None:
    """The packed layers of a model in a foreign format; None where it is in none that trirun reads.

    Raises:
        InputError: a variant of a known format that trirun does not read.
    """
    if source.quant_method == "bitnet":
        from .bitnet import BitNetWeights

        return BitNetWeights.of(source)
    return None
