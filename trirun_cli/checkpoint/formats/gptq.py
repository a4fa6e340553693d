"""GPTQ's 2-bit weights in its two versions, and AutoRound's, which are the same tensors.

Per module: ``qweight`` int32 [k/16, n], packed along k, ``qzeros`` int32 [k/g, n/16], packed along n, ``scales`` fp16
[k/g, n], ``g_idx`` int32 [k], all lowest bits first::

    w[r, c] = scales[g_idx[c], r] · (q[c, r] − z[g_idx[c], r])

Version 1 (``gptq``, what a config without ``checkpoint_format`` means) stores the zero points less one, version 2
(``gptq_v2``) as they are. From 1 to 2 is one addition of 0x55555555 to a whole word: a field of 3 carries into the
next. Taking one for the other moves every weight by its scale. That is refused: by ``sym``, which says that all zero
points are 2, and otherwise where the mean weight is nearer 0 in the other version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized

from ...errors import InputError
from ..model_dir import ModelDir
from .words import fp16_scales, on_grid, unpack_words

QWEIGHT, QZEROS, SCALES, ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"
_PARTS = tuple(part.removeprefix(".") for part in (QWEIGHT, QZEROS, SCALES, ORDER))
# From version 1 to version 2, all sixteen fields of a word.
_ONES = 0x55555555
# AutoRound's packing formats that are GPTQ's, and their version.
_AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 2, "auto_round:gptqmodel": 2}
_GPTQ = {"gptq": 1, "gptq_v2": 2}
# Of the mean of q − z: a real model's is near 0, a wrong version moves it by 1.
_MEAN_LIMIT = 0.5


@dataclass(frozen=True, slots=True)
class GptqWeights:
    """The packed modules of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`.

    Attributes:
        version: 1 or 2, of the zero points. symmetric: the config says that all zero points are 2.
    """

    source: ModelDir
    version: int
    symmetric: bool
    activation_bits: int = field(default=16, init=False)

    @classmethod
    def of(cls, source: ModelDir) -> GptqWeights:
        """Those of a model directory whose ``quant_method`` is ``gptq``, ``gptq_v2`` or ``auto-round``.

        Raises:
            InputError: they are not of 2 bits, or packed in a way that trirun does not read.
        """
        section = source.config["quantization_config"]
        if section.get("bits") != 2:
            raise InputError(f"{source.path}: bits is {section.get('bits')!r}; trirun reads 2")
        return cls(source, _version(source, section), section.get("sym") is True)

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        module, _, part = tensor_name.rpartition(".")
        return module if part in _PARTS and module + QWEIGHT in self.source else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`.

        Raises:
            QuantizationError: also where the zero points are of the other version, and where ``g_idx`` orders columns.
        """
        codes, scales, zeros = self._tensors(module)
        if self.symmetric and bool((zeros != 2).any()):
            found = ", ".join(map(str, zeros.unique().tolist()[:4]))
            raise QuantizationError(
                f"{module}: sym is true, but its zero points are {found} instead of 2: "
                f"checkpoint_format is not version {self.version}, or sym is wrong"
            )
        half, error = fp16_scales(scales, module)
        weight = on_grid(codes, half, zeros, codes.shape[1] // scales.shape[1])
        mean = float((codes.view(*scales.shape, -1).float() - zeros.float().unsqueeze(-1)).mean())
        other = mean - 1 if self.version == 2 else mean + 1
        if abs(mean) > _MEAN_LIMIT and abs(other) < abs(mean):
            raise QuantizationError(
                f"{module}: its weights have mean {mean:.2f} scales in version {self.version} and {other:.2f} in the "
                "other: checkpoint_format names the wrong version"
            )
        return weight, error

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k]."""
        codes, scales, zeros = self._tensors(module)
        grouped = codes.view(*scales.shape, -1).float() - zeros.float().unsqueeze(-1)
        return (grouped * scales.float().unsqueeze(-1)).flatten(1)

    def _tensors(self, module: str) -> tuple[Tensor, Tensor, Tensor]:
        words, zeros, scales = (self.source.tensor(module + part) for part in (QWEIGHT, QZEROS, SCALES))
        order = self.source.tensor(module + ORDER) if module + ORDER in self.source else None
        return unpack(words, zeros, scales, order, self.version, module)


def unpack(
    words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None, version: int, name: str = "weight"
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [n, k], scales [n, groups] and zero points uint8 [n, groups] (0..4) of a packed weight.

    Args:
        words: int32 [k/16, n]. zeros: int32 [groups, n/16]. scales: [groups, n]. order: int [k], or None.
        version: 1 or 2. name: the module, for messages.

    Raises:
        QuantizationError: shapes contradict each other, or ``order`` puts columns into groups out of order.
    """
    if words.dim() != 2 or words.dtype != torch.int32 or scales.dim() != 2 or not scales.shape[0]:
        raise QuantizationError(f"{name}: qweight is int32 [k/16, n], got {words.dtype} {list(words.shape)}")
    k, n, groups = words.shape[0] * 16, words.shape[1], scales.shape[0]
    if scales.shape[1] != n or k % groups or zeros.dtype != torch.int32 or list(zeros.shape) != [groups, -(-n // 16)]:
        found = f"scales {list(scales.shape)}, qzeros {zeros.dtype} {list(zeros.shape)}"
        raise QuantizationError(f"{name}: {found} do not belong to a weight [{n}, {k}]")
    if k // groups not in (32, 64, 128, k):
        raise QuantizationError(f"{name}: groups of {k // groups} columns; trirun has 32, 64, 128 or a row")
    if order is not None and not torch.equal(order.long(), torch.arange(k) // (k // groups)):
        raise QuantizationError(f"{name}: g_idx puts columns into groups out of order (desc_act), which trirun cannot")
    if version == 1:
        # Added in 64 bits and cut: carries between the fields are part of the format, one out of the word is not.
        zeros = (zeros.long() + _ONES).to(torch.int32)
    codes = unpack_words(words.t().contiguous())
    return codes, scales.t().contiguous(), unpack_words(zeros, n).t().contiguous()


def _version(source: ModelDir, section: dict[str, Any]) -> int:
    """Of the zero points, by the config."""
    if section.get("quant_method") == "auto-round":
        form, known = section.get("packing_format", "auto_round:auto_gptq"), _AUTO_ROUND
        key = "packing_format"
    else:
        form, known = section.get("checkpoint_format") or section["quant_method"], _GPTQ
        key = "checkpoint_format"
    if form not in known:
        raise InputError(f"{source.path}: {key} is {form!r}; trirun reads {', '.join(known)}")
    return known[form]
