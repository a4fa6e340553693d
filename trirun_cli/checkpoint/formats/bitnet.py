"""Ternary weights that are packed already, as Hugging Face stores BitNet b1.58 (``quant_method: bitnet``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.lossless.bitnet import divides_by_scale, unpack_bitnet

from ...errors import InputError
from ..model_dir import ModelDir, quant_method
from ..reader import SCALE, WEIGHT


@dataclass(frozen=True, slots=True)
class BitNetWeights:
    """The packed linear layers of a model directory.

    Attributes:
        divide: whether a layer divides by its stored scale; else it multiplies.
        kept: linear modules that are not packed.
    """

    source: ModelDir
    divide: bool
    kept: frozenset[str]

    @classmethod
    def of(cls, source: ModelDir) -> BitNetWeights | None:
        """Those of a model directory; None where it is of no such format.

        Raises:
            QuantizationError: a variant whose weights are not ternary, or of an unknown layer class.
            InputError: its layers normalize their input, which no other model's do.
        """
        if quant_method(source.config) != "bitnet":
            return None
        section = source.config["quantization_config"]
        if section.get("use_rms_norm"):
            raise InputError(f"{source.path}: its linear layers hold norms of their own (use_rms_norm)")
        return cls(source, divides_by_scale(section), frozenset(section.get("modules_to_not_convert") or ()))

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scale to fp16.

        Raises:
            InputError: a tensor is missing. QuantizationError: it is not what the format says.
        """
        packed, scale = self.source.tensor(module + WEIGHT), self.source.tensor(module + SCALE)
        return unpack_bitnet(packed, scale, divide=self.divide, name=module)

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], with its scale as it is stored."""
        stored = float(self.source.tensor(module + SCALE))
        trits = self.read(module)[0].codes.float() - 1
        return trits * (1 / stored if self.divide else stored)
