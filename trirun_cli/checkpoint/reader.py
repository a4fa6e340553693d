"""A packed checkpoint: a Hugging Face directory whose linear weights are tile64.

For every packed module there is ``<module>.weight`` int32 [n/64, k/32, 128], ``<module>.weight_scale`` fp16
[k/group_size, n] and, on a grid of real zero points, ``<module>.weight_zero`` (:mod:`trirun_kernels.weights.names`).
The grid is in ``config.json["quantization_config"]``; see :class:`Format`. Because packed tensors are called
``weight``, transformers without trirun refuses the directory instead of filling the layers with random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO, packed_modules
from trirun_kernels.weights.shapes import stored_shapes
from trirun_kernels.weights.spec import QuantSpec

from ..errors import InputError
from .model_dir import ModelDir

if TYPE_CHECKING:
    from trirun_kernels import PackedWeight
    from trirun_kernels.weights.numpy_codes import Codes

QUANT_METHOD = "trirun"
FORMAT_VERSION = 2
LAYOUT = "tile64"


@dataclass(slots=True)
class Format:
    """``quantization_config`` of a packed checkpoint.

    Attributes:
        group_size, zero: the grid of every packed module that ``overrides`` does not name (see
            :class:`trirun_kernels.QuantSpec`; ``zero`` null means stored zeros).
        overrides: module name to its own ``{"group_size", "zero"}``.
        padded: module name to its true [n, k] where that is not the stored, padded shape.
        modules_to_not_convert: linear modules that nothing packed is stored for: kept as they were, or the output head
            where it is one with a packed embedding.
        embeddings: packed modules that are embeddings; their presence makes the format's version 2.
        activation_bits: 16, or 8 for a model trained with 8-bit activations.
    """

    group_size: int = 128
    zero: float | None = 1.0
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    padded: dict[str, list[int]] = field(default_factory=dict)
    modules_to_not_convert: list[str] = field(default_factory=list)
    activation_bits: int = 16
    embeddings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The section as config.json holds it, with its method, version and layout."""
        fields, version = asdict(self), FORMAT_VERSION
        if not self.embeddings:
            # What a trirun without packed embeddings reads too.
            del fields["embeddings"]
            version = 1
        return {"quant_method": QUANT_METHOD, "format_version": version, "layout": LAYOUT, "bits": 2} | fields

    @classmethod
    def from_dict(cls, section: dict[str, Any], where: object = "quantization_config") -> Format:
        """Read and check a ``quantization_config``.

        Raises:
            InputError: another method, a newer format version, another layout, or fields of the wrong kind.
        """
        if not isinstance(section, dict):
            raise InputError(f"{where}: quantization_config is {section!r}, not an object")
        if section.get("quant_method") != QUANT_METHOD:
            raise InputError(f"{where} is not a trirun checkpoint: quant_method is {section.get('quant_method')!r}")
        version = section.get("format_version")
        if not isinstance(version, int) or version < 1:
            raise InputError(f"{where}: format_version is {version!r}")
        if version > FORMAT_VERSION:
            raise InputError(
                f"{where} has format version {version}; this trirun reads up to {FORMAT_VERSION}", "upgrade trirun"
            )
        if section.get("layout") != LAYOUT or section.get("bits") != 2:
            raise InputError(
                f"{where}: layout {section.get('layout')!r} with {section.get('bits')!r} bits is not 2-bit {LAYOUT}"
            )
        known = {name: section[name] for name in cls.__dataclass_fields__ if name in section}
        made = cls(**known)
        kinds = {"overrides": dict, "padded": dict, "modules_to_not_convert": list, "embeddings": list}
        for name, kind in kinds.items():
            if not isinstance(getattr(made, name), kind):
                raise InputError(f"{where}: {name} is {getattr(made, name)!r}")
        for name in ("modules_to_not_convert", "embeddings"):
            if not all(isinstance(module, str) for module in getattr(made, name)):
                raise InputError(f"{where}: {name} is {getattr(made, name)!r}, not names")
        if made.activation_bits not in (8, 16):
            raise InputError(f"{where}: activation_bits is {made.activation_bits!r}, not 8 or 16")
        try:
            made.spec("")
            for module in made.overrides:
                made.spec(module)
        except (ArithmeticError, TypeError, ValueError, KeyError) as error:
            raise InputError(f"{where}: {error}") from None
        return made

    def spec(self, module: str) -> QuantSpec:
        """The grid of one module, by its name."""
        own = self.overrides.get(module, {"group_size": self.group_size, "zero": self.zero})
        return QuantSpec(own["group_size"], own["zero"])

    def shape(self, module: str, words: Sequence[int]) -> tuple[int, int]:
        """The true [n, k] of one module, by its name and the shape of its words."""
        n, k = self.padded.get(module) or (words[0] * 64, words[1] * 32)
        return n, k

    def check(self, source: ModelDir, module: str) -> None:
        """That a packed module's tensors in a directory have the shapes and dtypes that the format says; nothing but
        their headers is read.

        Raises:
            InputError: one is missing or has others.
        """
        if module + WEIGHT not in source:
            raise InputError(f"{source.path}: {module}{SCALE} has no {module}{WEIGHT} beside it")
        words = source[module + WEIGHT]
        if words.dtype != "I32" or len(words.shape) != 3 or words.shape[2] != 128:
            found = f"{words.dtype} {list(words.shape)}"
            raise InputError(f"{source.path}: {module}{WEIGHT} is {found}, not I32 [n/64, k/32, 128]")
        spec = self.spec(module)
        try:
            n, k = self.shape(module, words.shape)
            if type(n) is not int or type(k) is not int:
                raise TypeError(f"its true shape is [{n!r}, {k!r}]")
            expected_words, expected_groups = stored_shapes(n, k, spec)
        except (TypeError, ValueError) as error:
            raise InputError(f"{source.path}: {module}: {error}") from None
        expected = {WEIGHT: ("I32", expected_words), SCALE: ("F16", expected_groups)}
        if spec.zero is None:
            expected[ZERO] = ("F16", expected_groups)
        elif module + ZERO in source:
            raise InputError(f"{source.path}: {module}{ZERO} is stored, but the grid's zero is {spec.zero}")
        for suffix, (dtype, shape) in expected.items():
            if module + suffix not in source:
                raise InputError(f"{source.path}: {module}{suffix} is missing")
            stored = source[module + suffix]
            if (stored.dtype, stored.shape) != (dtype, shape):
                found = f"{stored.dtype} {list(stored.shape)}"
                raise InputError(f"{source.path}: {module}{suffix} is {found}, the format says {dtype} {list(shape)}")


class Checkpoint(ModelDir):
    """A packed checkpoint opened for reading: ``Checkpoint.open("DIR or ORG/NAME")``.

    Opening reads headers alone, and checks every packed tensor's name, shape and dtype. Weights stay in the mapped
    files until they are touched.

    Attributes:
        path: the directory. config: config.json.
        format: its ``quantization_config``: grids, padding, modules kept as they were, activation bits.
        modules: names of the packed modules, sorted.
        names, files: names of all tensors, and the files that hold them.

    Raises:
        InputError: it is not a trirun checkpoint, is damaged, or a stored shape contradicts the format.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        if self.quant_method is None:
            raise InputError(f"{self.path} is not quantized", f"trirun quantize {self.path} --wbits 2 makes it 2-bit")
        self.format = Format.from_dict(self.config["quantization_config"], self.path)
        self.modules = packed_modules(self)
        if not self.modules:
            raise InputError(f"{self.path} says it is packed but holds no packed weight")
        for module in self.modules:
            self.format.check(self, module)

    def shape(self, module: str) -> tuple[int, int]:
        """The true [n, k] of a packed module."""
        return self.format.shape(module, self[module + WEIGHT].shape)

    def packed(self, module: str) -> PackedWeight:
        """One packed weight on the CPU, in the mapped file: it starts at any byte.

        Raises:
            TensorFileError: there is no such module, or the file has been cut since it was opened.
        """
        from trirun_kernels import PackedWeight

        n, k = self.shape(module)
        zeros = self.tensor(module + ZERO) if module + ZERO in self else None
        return PackedWeight(
            self.tensor(module + WEIGHT), self.tensor(module + SCALE), zeros, n, k, self.format.spec(module)
        )

    def packed_bytes(self, module: str) -> int:
        """Stored bytes of a packed module: words, scales and zeros."""
        return sum(self[module + part].nbytes for part in (WEIGHT, SCALE, ZERO) if module + part in self)

    def codes(self, module: str) -> Codes:
        """One packed weight, unpacked by numpy, without torch.

        Raises:
            TensorFileError: there is no such module, or the file has been cut since it was opened.
        """
        from trirun_kernels.weights.numpy_codes import unpack

        n, k = self.shape(module)
        zeros = self.array(module + ZERO) if module + ZERO in self else None
        words, scales = self.array(module + WEIGHT), self.array(module + SCALE)
        return unpack(words, scales, zeros, n, k, self.format.spec(module))
