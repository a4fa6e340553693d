"""MLX's affine 2-bit weights (``mlx_lm.convert -q --q-bits 2``, and Ternary-Bonsai).

Per module: ``weight`` uint32 [n, k/16], ``scales`` and ``biases`` [n, k/g], lowest bits first::

    w[r, c] = q[r, c] · scales[r, c // g] + biases[r, c // g]

which MLX evaluates in the scales' own type: the product is rounded, then the sum. On trirun's grid ``s · (q − z)`` that
is the zero point ``z = −bias / scale``: 1 for Bonsai, whose bias is −scale. Whatever has ``scales`` is packed,
embeddings too; config.json says group size and bits, for modules of their own by name. A mixture's experts are one
module with a first dimension more (:mod:`.experts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels.weights.names import WEIGHT

from ...errors import InputError
from ..model_dir import MLX_SECTION, ModelDir
from .experts import split_stacks, stack_of
from .words import first, fp16_scales, on_grid, pack_words, unpack_words, zero_points

SCALES, BIASES = ".scales", ".biases"
# Routers of mixtures, which MLX packs in more bits than the rest; here they are floats.
_ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")


class MlxDir(ModelDir):
    """A model directory of MLX's, tensors of all experts given one an expert: :func:`~.experts.split_stacks`."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._tensors = split_stacks(self._tensors)


@dataclass(frozen=True, slots=True)
class MlxWeights:
    """The packed modules of a directory; see :class:`~trirun_cli.checkpoint.formats.ForeignWeights`.

    Attributes:
        group_sizes, widths: columns of a scale and bits of a code, by module.
    """

    source: ModelDir
    group_sizes: dict[str, int]
    widths: dict[str, int]
    activation_bits: int = field(default=16, init=False)

    @classmethod
    def of(cls, source: ModelDir) -> MlxWeights:
        """Those of a model directory with MLX's ``quantization`` section.

        Raises:
            InputError: a module is not of 2 bits, of another mode, or not of a group size that trirun has.
        """
        section = source.config.get(MLX_SECTION) or source.config["quantization_config"]
        sizes: dict[str, int] = {}
        widths: dict[str, int] = {}
        for module in (name.removesuffix(SCALES) for name in source if name.endswith(SCALES)):
            own = section.get(stack_of(module))
            facts = section | own if isinstance(own, dict) else section
            bits, mode, size = facts.get("bits"), facts.get("mode", "affine"), facts.get("group_size")
            known = (2, 4, 8) if module.endswith(_ROUTERS) else (2,)
            if bits not in known or mode != "affine":
                raise InputError(f"{source.path}: {module} has {bits} bits, mode {mode!r}; trirun reads 2, 'affine'")
            if size not in (32, 64, 128):
                raise InputError(f"{source.path}: {module} has groups of {size!r}, not 32, 64 or 128")
            sizes[module] = size
            widths[module] = bits
        return cls(source, sizes, widths)

    def packed(self, tensor_name: str) -> str | None:
        """See :class:`~trirun_cli.checkpoint.formats.ForeignWeights`."""
        module, _, part = tensor_name.rpartition(".")
        return module if part in ("weight", "scales", "biases") and module in self.group_sizes else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scales to fp16.

        Raises:
            TensorFileError: a tensor is missing.
            QuantizationError: shapes contradict each other, or a bias is no fp16 multiple of its scale; the first such
                is named with its place and values.
        """
        words, scales, biases = (self.source.tensor(module + part) for part in (WEIGHT, SCALES, BIASES))
        return read(words, scales, biases, self.group_sizes[module], module)

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], as MLX evaluates it."""
        words, scales, biases = (self.source.tensor(module + part) for part in (WEIGHT, SCALES, BIASES))
        return dequantize(words, scales, biases, self.group_sizes[module], self.widths[module])


def read(
    words: Tensor, scales: Tensor, biases: Tensor, group_size: int, name: str = "weight"
) -> tuple[Quantized, float]:
    """Codes and scales of words [n, k/16], scales and biases [n, k/g]; see :meth:`MlxWeights.read`."""
    codes = _codes(words, scales, biases, group_size, name)
    exact = scales.double()
    # A group of zeros has any zero point; it takes that of its matrix.
    empty = (scales == 0) & (biases == 0)
    zeros = torch.where(empty, float("nan"), -biases.double() / exact)
    common = zeros[~empty].mode().values if bool((~empty).any()) else torch.tensor(1.0, dtype=torch.float64)
    zeros = torch.where(empty, common, zeros).to(torch.float16)
    broken = zeros.double() * exact != -biases.double()
    if broken.any():
        row, group = first(broken)
        values = f"scale {scales[row, group].item()!r} and bias {biases[row, group].item()!r}"
        raise QuantizationError(
            f"{name}: row {row}, group {group} has {values}: the bias is no exact fp16 multiple of the scale"
        )
    half, error = fp16_scales(scales, name)
    return on_grid(codes, half, zeros, group_size), error


def dequantize(words: Tensor, scales: Tensor, biases: Tensor, group_size: int, bits: int = 2) -> Tensor:
    """Float32 [n, k], as ``mx.dequantize`` evaluates it: product and sum each rounded to the scales' type.

    Args:
        bits: of a code; words are uint32 [n, k · bits / 32]."""
    codes = _codes(words, scales, biases, group_size, "weight", bits)
    grouped = codes.view(codes.shape[0], -1, group_size).to(scales.dtype)
    return (grouped * scales.unsqueeze(-1) + biases.unsqueeze(-1)).flatten(1).float()


def write(weight: Quantized, name: str = "weight") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of :func:`read`: a module's tensors by suffix, and its section of the config.

    Raises:
        QuantizationError: its k is no multiple of 32, or a bias −s·z is not exact in fp16; named with its values.
    """
    size = weight.spec.group_size
    if size == -1:
        size = next((size for size in (128, 64, 32) if weight.k % size == 0), 0)
        if not size:
            raise QuantizationError(f"{name}: MLX's groups of 32, 64 or 128 columns do not fit {weight.k} columns")
    repeats = weight.k // size // weight.scales.shape[1]
    scales = weight.scales.repeat_interleave(repeats, 1)
    zeros = zero_points(weight).repeat_interleave(repeats, 1).double()
    exact = -scales.double() * zeros
    biases = exact.to(torch.float16)
    if not torch.equal(biases.double(), exact):
        row, group = first(biases.double() != exact)
        raise QuantizationError(
            f"{name}: row {row}, group {group} needs bias {exact[row, group].item()!r}, which fp16 does not hold"
        )
    words = pack_words(weight.codes).view(torch.uint32)
    return {WEIGHT: words, SCALES: scales, BIASES: biases}, {"group_size": size, "bits": 2}


def section(modules: dict[str, dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json for packed modules and their sections: the commonest for all, the others by name. And
    what mlx_lm looks for beside ``rope_parameters``, where transformers has it since version 5, and under one name.

    Args:
        config: config.json as it is.
    """
    rotary, made = config.get("rope_parameters"), dict[str, Any]()
    # Without them mlx_lm takes its own default, another base of the angles: fluent nonsense.
    if isinstance(rotary, dict) and "rope_theta" in rotary and not config.get("rope_scaling"):
        made["rope_theta"] = rotary["rope_theta"]
        if rotary.get("rope_type", "default") != "default":
            made["rope_scaling"] = rotary
    if "num_local_experts" in config and config.get("model_type") != "mixtral":
        made["num_experts"] = config["num_local_experts"]
    if not modules:
        return made
    common = max(modules.values(), key=list(modules.values()).count)
    own = {name: facts for name, facts in modules.items() if facts != common}
    quantization = common | {"mode": "affine"} | own
    return made | {MLX_SECTION: quantization, "quantization_config": quantization}


def _codes(words: Tensor, scales: Tensor, biases: Tensor, group_size: int, name: str, bits: int = 2) -> Tensor:
    each = 32 // bits
    if words.dim() != 2 or words.dtype not in (torch.uint32, torch.int32):
        found = f"{words.dtype} {list(words.shape)}"
        raise QuantizationError(f"{name}: packed weights are uint32 [n, k/{each}], got {found}")
    if words.shape[1] * each % group_size:
        raise QuantizationError(f"{name}: {words.shape[1] * each} columns are no whole groups of {group_size}")
    groups = [words.shape[0], words.shape[1] * each // group_size]
    if list(scales.shape) != groups or list(biases.shape) != groups:
        found = f"{list(scales.shape)} and {list(biases.shape)}"
        raise QuantizationError(f"{name}: scales and biases are {found}, groups of {group_size} make {groups}")
    return unpack_words(words, bits=bits)
