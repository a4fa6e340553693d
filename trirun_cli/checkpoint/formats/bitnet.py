"""BitNet b1.58 as Hugging Face stores it: ``quant_method: bitnet``, ``linear_class: bitlinear`` or ``autobitlinear``.

Per layer, ``<module>.weight`` is uint8 [n/4, k] and ``<module>.weight_scale`` one number. How they make a weight is in
:mod:`trirun_gptq.lossless.bitnet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.lossless.bitnet import unpack_bitnet
from trirun_kernels.weights.names import SCALE, WEIGHT

from ...errors import InputError
from ..model_dir import ModelDir


@dataclass(frozen=True, slots=True)
class BitNetWeights:
    """The packed linear layers of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`.

    Attributes:
        divide: whether a layer divides by its stored scale; else it multiplies.
        kept: linear modules that are not packed.
        activation_bits, suffixes: see there.
    """

    source: ModelDir
    divide: bool
    kept: frozenset[str]
    activation_bits: int = 8
    suffixes: tuple[str, ...] = (WEIGHT, SCALE)

    @classmethod
    def of(cls, source: ModelDir) -> BitNetWeights:
        """Those of a model directory whose ``quant_method`` is ``bitnet``.

        Raises:
            InputError: its weights are not ternary, its layers are of an unknown class, or they normalize their input,
                which no other model's do.
        """
        section = source.config["quantization_config"]
        if section.get("use_rms_norm"):
            raise InputError(f"{source.path}: its linear layers hold norms of their own (use_rms_norm)")
        try:
            divide = divides_by_scale(section)
        except ValueError as error:
            raise InputError(f"{source.path}: {error}") from None
        return cls(source, divide, frozenset(section.get("modules_to_not_convert") or ()))

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scale to fp16: 0 where it is exact.

        Raises:
            TensorFileError: a tensor is missing. QuantizationError: it is not what the format says.
        """
        packed, scale = self.source.tensor(module + WEIGHT), self.source.tensor(module + SCALE)
        return unpack_bitnet(packed, scale, divide=self.divide, name=module)

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], with its scale as it is stored."""
        stored = float(self.source.tensor(module + SCALE))
        trits = self.read(module)[0].codes.float() - 1
        return trits * (1 / stored if self.divide else stored)


def divides_by_scale(section: Mapping[str, Any]) -> bool:
    """Which convention a ``quantization_config`` of BitNet stands for: True when a layer divides by its scale.

    Raises:
        ValueError: its weights are not ternary, or its layer class is unknown.
    """
    kind = section.get("linear_class", "bitlinear")
    if kind == "bitlinear":
        return True
    if kind != "autobitlinear":
        raise ValueError(f"linear_class is {kind!r}; 'bitlinear' and 'autobitlinear' are known")
    mode = section.get("quantization_mode", "offline")
    if mode != "offline":
        raise ValueError(
            f"quantization_mode is {mode!r}: the checkpoint holds latent float weights, not ternary ones; "
            "use the packed release of the model"
        )
    return False
