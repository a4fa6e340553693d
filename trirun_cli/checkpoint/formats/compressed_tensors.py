"""compressed-tensors' ``pack-quantized`` weights of 2 bits, as llm-compressor writes them and vLLM runs them.

Per module: ``weight_packed`` int32 [n, ⌈k/16⌉], ``weight_scale`` [n, k/g] ([n, 1] for strategy ``channel``),
``weight_shape`` int64 [n, k], and for asymmetric weights ``weight_zero_point`` int32 [⌈n/16⌉, k/g], packed along n.
Both hold signed numbers −2..1 plus 2, lowest bits first::

    w[r, c] = (q[r, c] − z[r, c // g]) · weight_scale[r, c // g],    z = 2 where symmetric

The two offsets of 2 cancel in an asymmetric difference. A module is packed where it has ``weight_packed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels.weights.names import SCALE

from ...errors import InputError
from ..model_dir import ModelDir
from .humming import refuse_codes_from_zero
from .words import first, fp16_scales, on_grid, pack_words, steps, unpack_words, zero_points

PACKED, SHAPE, ZERO_POINT, ORDER = ".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"
_PARTS = tuple(part.removeprefix(".") for part in (PACKED, SCALE, SHAPE, ZERO_POINT, ORDER))


@dataclass(frozen=True, slots=True)
class CompressedTensorsWeights:
    """The packed modules of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""

    source: ModelDir
    activation_bits: int = 16

    @classmethod
    def of(cls, source: ModelDir) -> CompressedTensorsWeights:
        """Those of a model directory whose ``quant_method`` is ``compressed-tensors``.

        Raises:
            InputError: a group of its config is not ``pack-quantized`` 2-bit integers, one scale a group or channel.
        """
        section = source.config["quantization_config"]
        bits = {_checked_group(source, section, group) for group in (section.get("config_groups") or {}).values()}
        if len(bits) != 1:
            raise InputError(f"{source.path}: config_groups describe {len(bits)} kinds of activations, not one")
        return cls(source, bits.pop())

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        module, _, part = tensor_name.rpartition(".")
        return module if part in _PARTS and module + PACKED in self.source else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        return read(*self._tensors(module), module)

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], as the library evaluates it: rounded to the scales' type."""
        return dequantize(*self._tensors(module))

    def _tensors(self, module: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        tensor = self.source.tensor
        words, scales, shape = tensor(module + PACKED), tensor(module + SCALE), tensor(module + SHAPE)
        # Of other shapes the rest is refused, where it is unpacked.
        if module + ORDER in self.source and scales.dim() == 2 and shape.numel() == 2:
            order, size = tensor(module + ORDER), int(shape.flatten()[1]) // max(scales.shape[1], 1)
            if not torch.equal(order.long(), torch.arange(order.numel()) // max(size, 1)):
                raise QuantizationError(f"{module}: weight_g_idx puts columns into groups out of order (actorder)")
        return words, scales, shape, tensor(module + ZERO_POINT) if module + ZERO_POINT in self.source else None


def _checked_group(source: ModelDir, section: dict[str, Any], group: dict[str, Any]) -> int:
    """Activation bits of one config group, whose weights trirun reads."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    form = group.get("format") or section.get("format")
    found = {"format": form, "num_bits": weights.get("num_bits"), "type": weights.get("type", "int")}
    for key, wanted in {"format": "pack-quantized", "num_bits": 2, "type": "int"}.items():
        if found[key] != wanted:
            raise InputError(f"{source.path}: {key} is {found[key]!r}; trirun reads {wanted!r}")
    if weights.get("strategy") not in ("group", "channel"):
        raise InputError(f"{source.path}: strategy is {weights.get('strategy')!r}, not 'group' or 'channel'")
    if inputs is None:
        return 16
    if inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int":
        raise InputError(f"{source.path}: input_activations are {inputs.get('num_bits')}-bit {inputs.get('type')!r}")
    return 8


def read(
    words: Tensor, scales: Tensor, shape: Tensor, zeros: Tensor | None, name: str = "weight"
) -> tuple[Quantized, float]:
    """Codes and scales of a packed weight, and the relative error of rounding its scales to fp16.

    Args:
        words: int32 [n, ⌈k/16⌉]. scales: [n, groups]. shape: the two numbers n, k.
        zeros: int32 [⌈n/16⌉, groups]; None where symmetric. name: the module, for messages.

    Raises:
        QuantizationError: shapes contradict each other, the codes are those of another convention, or a scale is
            outside fp16's range.
    """
    codes, points = _codes(words, scales, shape, zeros, name)
    if points is None:
        refuse_codes_from_zero(codes, name)
    half, error = fp16_scales(scales, name)
    return on_grid(codes, half, 2.0 if points is None else points, codes.shape[1] // scales.shape[1]), error


def dequantize(words: Tensor, scales: Tensor, shape: Tensor, zeros: Tensor | None) -> Tensor:
    """Float32 [n, k], rounded to the scales' type as the library does."""
    codes, points = _codes(words, scales, shape, zeros, "weight")
    grouped = codes.view(*scales.shape, -1).float() - (2.0 if points is None else points.float().unsqueeze(-1))
    return (grouped * scales.float().unsqueeze(-1)).to(scales.dtype).float().flatten(1)


def write(weight: Quantized, name: str = "weight") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A module's tensors by suffix, and the ``weights`` of its config group.

    A weight of multiples −2..1 of its scales is symmetric; where a group reaches 2, its scale's sign changes.
    Any other grid of whole zero points is asymmetric.

    Raises:
        QuantizationError: a zero point is no whole number, or not in 0..3; named with its place and value.
    """
    values, scales = steps(weight, name), weight.scales
    grouped = values.view(weight.n, scales.shape[1], -1)
    high, low = (grouped > 1).any(-1), (grouped < -1).any(-1)
    packed_zeros = None
    if bool((high & low).any()) or bool((grouped > 2).any()) or bool((grouped < -2).any()):
        stored = zero_points(weight)
        outside = (stored < 0) | (stored > 3)
        if outside.any():
            row, group = first(outside)
            raise QuantizationError(f"{name}: row {row}, group {group} has zero point {stored[row, group]}, not 0..3")
        codes, packed_zeros = weight.codes, pack_words(stored.t().to(torch.uint8)).t().contiguous()
    else:
        sign = torch.where(high, -1, 1).to(torch.int8)
        codes, scales = (grouped * sign.unsqueeze(-1) + 2).to(torch.uint8).flatten(1), scales * sign
    tensors = {PACKED: pack_words(codes), SCALE: scales.contiguous(), SHAPE: torch.tensor([weight.n, weight.k])}
    if packed_zeros is not None:
        tensors[ZERO_POINT] = packed_zeros
    strategy = {"strategy": "channel"} if scales.shape[1] == 1 else {"strategy": "group"}
    size = None if scales.shape[1] == 1 else weight.spec.group_size
    facts = {"num_bits": 2, "type": "int", "symmetric": packed_zeros is None, "group_size": size}
    return tensors, facts | strategy


def section(modules: dict[str, dict[str, Any]], kept: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of packed modules and their facts; ``kept`` are the linear modules left dense."""
    kinds: list[dict[str, Any]] = []
    for facts in modules.values():
        if facts not in kinds:
            kinds.append(facts)
    groups = {}
    for index, kind in enumerate(kinds):
        # One kind is named by class; several by their modules.
        targets = ["Linear"] if len(kinds) == 1 else [name for name, facts in modules.items() if facts == kind]
        groups[f"group_{index}"] = {"targets": targets, "weights": kind, "input_activations": None}
    head = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return head | {"config_groups": groups, "ignore": kept}


def _codes(
    words: Tensor, scales: Tensor, shape: Tensor, zeros: Tensor | None, name: str
) -> tuple[Tensor, Tensor | None]:
    """Codes uint8 [n, k] and zero points uint8 [n, groups], checked."""
    if shape.numel() != 2:
        raise QuantizationError(f"{name}: weight_shape is of shape {list(shape.shape)}, not n and k")
    n, k = shape.tolist()
    if words.dtype != torch.int32 or list(words.shape) != [n, -(-k // 16)] or n <= 0 or k <= 0:
        found = f"{words.dtype} {list(words.shape)}"
        raise QuantizationError(f"{name}: weight_packed is {found}; weight_shape says int32 [{n}, {k}/16]")
    if scales.dim() != 2 or scales.shape[0] != n or scales.shape[1] < 1 or k % scales.shape[1]:
        raise QuantizationError(f"{name}: weight_scale is {list(scales.shape)} for a weight [{n}, {k}]")
    if k // scales.shape[1] not in (32, 64, 128, k):
        raise QuantizationError(f"{name}: groups of {k // scales.shape[1]} columns; trirun has 32, 64, 128 or a row")
    if zeros is None:
        return unpack_words(words, k), None
    if zeros.dtype != torch.int32 or list(zeros.shape) != [-(-n // 16), scales.shape[1]]:
        found = f"{zeros.dtype} {list(zeros.shape)} for scales {list(scales.shape)}"
        raise QuantizationError(f"{name}: weight_zero_point is {found}")
    return unpack_words(words, k), unpack_words(zeros.t().contiguous(), n).t().contiguous()
