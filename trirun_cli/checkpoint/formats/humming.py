"""Humming's 2-bit weights (``quant_method: humming``; models quantized with GSQ).

Per module: ``weight`` int32 [n, k/16] and ``weight_scale`` bfloat16 [n, k/g], lowest bits first::

    w[r, c] = (q[r, c] − 2) · weight_scale[r, c // g]

A scale of bfloat16 is rounded where fp16 does not hold it; the error is reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels.weights.names import SCALE, WEIGHT

from ...errors import InputError
from ..model_dir import ModelDir
from .words import fp16_scales, on_grid, unpack_words

_READ = {"b_dtype": "uint2", "has_zero_point": False, "weight_scale_type": "group"}


@dataclass(frozen=True, slots=True)
class HummingWeights:
    """The packed modules of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""

    source: ModelDir
    group_size: int
    activation_bits: int = field(default=16, init=False)

    @classmethod
    def of(cls, source: ModelDir) -> HummingWeights:
        """Those of a model directory whose ``quant_method`` is ``humming``.

        Raises:
            InputError: its weights are not uint2 in groups without zero points.
        """
        section = source.config["quantization_config"]
        for key, wanted in _READ.items():
            found = section.get(key, wanted if key == "has_zero_point" else None)
            if found != wanted:
                raise InputError(f"{source.path}: {key} is {found!r}; trirun reads {wanted!r}")
        size = section.get("weight_scale_group_size")
        if size not in (32, 64, 128):
            raise InputError(f"{source.path}: weight_scale_group_size is {size!r}, not 32, 64 or 128")
        return cls(source, size)

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        module, _, part = tensor_name.rpartition(".")
        packed = part in ("weight", "weight_scale") and module + SCALE in self.source and module + WEIGHT in self.source
        return module if packed else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        return read(self.source.tensor(module + WEIGHT), self.source.tensor(module + SCALE), self.group_size, module)

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], with its scales as they are stored."""
        scales = self.source.tensor(module + SCALE).float()
        codes = unpack_words(self.source.tensor(module + WEIGHT))
        return ((codes.view(*scales.shape, -1).float() - 2) * scales.unsqueeze(-1)).flatten(1)


def read(words: Tensor, scales: Tensor, group_size: int, name: str = "weight") -> tuple[Quantized, float]:
    """Codes and scales of words int32 [n, k/16] and scales [n, k/g], and the relative error of rounding these to fp16.

    Raises:
        QuantizationError: shapes or dtypes are off, the codes are those of another convention, or a scale is outside
            fp16's range.
    """
    if words.dim() != 2 or words.dtype != torch.int32:
        raise QuantizationError(f"{name}: packed weights are int32 [n, k/16], got {words.dtype} {list(words.shape)}")
    if words.shape[1] * 16 % group_size:
        raise QuantizationError(f"{name}: {words.shape[1] * 16} columns are no whole groups of {group_size}")
    groups = [words.shape[0], words.shape[1] * 16 // group_size]
    if list(scales.shape) != groups:
        raise QuantizationError(f"{name}: scales are {list(scales.shape)}, groups of {group_size} make {groups}")
    codes = unpack_words(words)
    refuse_codes_from_zero(codes, name)
    half, error = fp16_scales(scales, name)
    return on_grid(codes, half, 2.0, group_size), error


def refuse_codes_from_zero(codes: Tensor, name: str) -> None:
    """Refuse ternary codes 0, 1, 2 where a symmetric format has 1, 2, 3: every weight would lie one scale too low.

    Raises:
        QuantizationError: there is no code 3, and the mean code is nearer 1 than 2.
    """
    if codes.numel() and not bool((codes == 3).any()) and float(codes.float().mean()) < 1.5:
        mean = float(codes.float().mean())
        raise QuantizationError(
            f"{name}: its codes are 0..2 with mean {mean:.2f}: they count from −1, as MLX's do, and not from −2"
        )
