"""BitNet b1.58 as Hugging Face stores it (``quant_method: bitnet``), Falcon-E among its models.

Per layer, ``<module>.weight`` is uint8 [n/4, k] and ``<module>.weight_scale`` one number, which ``linear_class``
``bitlinear`` (the default) divides by and ``autobitlinear`` multiplies by. In ``quantization_mode: online`` the layer
holds its latent float weights instead and makes them ternary as it runs. The arithmetic is in
:mod:`trirun_gptq.lossless.bitnet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.lossless.bitnet import online_trits, pack_bitnet, unpack_bitnet
from trirun_kernels.weights.names import EMBEDDING, HEAD, SCALE, WEIGHT

from ...errors import InputError
from ..model_dir import ModelDir
from .words import fp16_scales, on_grid

# Trained scales are a few hundredths. One above this is the reciprocal of one.
_LARGEST_SCALE = 3.0


@dataclass(frozen=True, slots=True)
class BitNetWeights:
    """The packed linear layers of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`.

    Attributes:
        divide: whether a layer divides by its stored scale; else it multiplies.
        online: the layers hold latent weights.
        kept: linear modules that are not packed.
        activation_bits: see there.
    """

    source: ModelDir
    divide: bool
    online: bool
    kept: frozenset[str]
    activation_bits: int = 8

    @classmethod
    def of(cls, source: ModelDir) -> BitNetWeights:
        """Those of a model directory whose ``quant_method`` is ``bitnet``.

        Raises:
            InputError: its layers are of an unknown class, its config contradicts itself, or its layers normalize their
                input, which no other model's do.
        """
        section = source.config["quantization_config"]
        if section.get("use_rms_norm"):
            raise InputError(f"{source.path}: its linear layers hold norms of their own (use_rms_norm)")
        try:
            divide, online = divides_by_scale(section), is_online(section)
        except ValueError as error:
            raise InputError(f"{source.path}: {error}") from None
        return cls(source, divide, online, frozenset(section.get("modules_to_not_convert") or ()))

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        module = tensor_name.removesuffix(WEIGHT).removesuffix(SCALE)
        weight = module + WEIGHT
        if module == tensor_name or module in self.kept or weight not in self.source:
            return None
        if self.online:
            ternary = len(self.source[weight].shape) == 2 and weight not in (EMBEDDING, HEAD)
        else:
            ternary = module + SCALE in self.source or self.source[weight].dtype == "U8"
        return module if ternary else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scale to fp16: 0 where it is exact.

        Raises:
            TensorFileError: a tensor is missing. QuantizationError: it is not what the format says, or its scale is the
                reciprocal of one.
        """
        if self.online:
            ternary = self.dense(module)
            scales, error = fp16_scales(ternary.abs().amax().expand(len(ternary), 1), module)
            return on_grid((ternary.sign() + 1).to(torch.uint8), scales, 1.0, ternary.shape[1]), error
        packed, scale = self.source.tensor(module + WEIGHT), self.source.tensor(module + SCALE)
        weight, error = unpack_bitnet(packed, scale, divide=self.divide, name=module)
        if not weight.scales.numel():
            raise QuantizationError(f"{module}: its weight has no rows")
        if abs(float(weight.scales[0, 0])) > _LARGEST_SCALE:
            made = "divides" if self.divide else "multiplies"
            raise QuantizationError(
                f"{module}: its linear_class {made} by weight_scale {float(scale)!r}, a scale of "
                f"{float(weight.scales[0, 0])!r}: no trained layer has such; the other class is probably meant"
            )
        return weight, error

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], with its scale as it is stored."""
        if self.online:
            return online_trits(self.source.tensor(module + WEIGHT), module).float()
        stored = float(self.source.tensor(module + SCALE))
        trits = self.read(module)[0].codes.float() - 1
        return trits / stored if self.divide else trits * stored


def divides_by_scale(section: Mapping[str, Any]) -> bool:
    """Which convention a ``quantization_config`` of BitNet stands for: True when a layer divides by its scale.

    Raises:
        ValueError: its layer class is unknown.
    """
    kind = section.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise ValueError(f"linear_class is {kind!r}; 'bitlinear' and 'autobitlinear' are known")
    return kind == "bitlinear"


def is_online(section: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` of BitNet says that the layers hold latent weights.

    Raises:
        ValueError: the mode is unknown, or of a layer class that has none.
    """
    mode = section.get("quantization_mode", "offline")
    if mode not in ("offline", "online"):
        raise ValueError(f"quantization_mode is {mode!r}; 'offline' and 'online' are known")
    if mode == "online" and divides_by_scale(section):
        raise ValueError("quantization_mode is 'online', but layers of linear_class 'bitlinear' are always packed")
    return mode == "online"


def write(weight: Quantized, name: str = "weight") -> dict[str, Tensor]:
    """A module's tensors by suffix, for layers that multiply; see :func:`trirun_gptq.lossless.bitnet.pack_bitnet`."""
    packed, scale = pack_bitnet(weight, name)
    return {WEIGHT: packed, SCALE: scale}


def section(kept: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of what :func:`write` makes; ``kept`` are the linear modules left dense."""
    kind = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    return kind | {"use_rms_norm": False, "modules_to_not_convert": kept}
