"""What a 2-bit grid is: the one definition read by quantizer, packer, kernels and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZES = (-1, 32, 64, 128)
_FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """A uniform 2-bit grid, ``w = s · (q − zero)`` with codes ``q`` in 0..3.

    Attributes:
        group_size: consecutive input features (k) that share one scale: 32, 64, 128, or -1 for one scale per
            output channel.
        zero: the zero point shared by every group: 1.0 gives {-1, 0, 1, 2}·s (ternary when code 3 is unused;
            scales may be negative, which covers {-2, -1, 0, 1}), 2.0 gives {-2, -1, 0, 1}·s, 1.5 the mid-rise grid
            {±½, ±1½}·s. ``None`` stores one real fp16 zero point per group beside its scale.

    Raises:
        ValueError: the group size is not one the kernels have, or zero is no number of fp16's range.
    """

    group_size: int = 128
    zero: float | None = 1.0

    def __post_init__(self) -> None:
        # type(): files hold them, and neither 64.0 nor true is one.
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            known = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"QuantSpec: group_size={self.group_size} is not one of {known}")
        if self.zero is not None and (isinstance(self.zero, bool) or not abs(self.zero) <= _FP16_MAX):
            raise ValueError(f"QuantSpec: zero={self.zero} is no number of fp16's range")

    @property
    def has_plain_zero(self) -> bool:
        """Whether the zero point is one small number in quarters, which 16-bit fragments hold exactly beside a code."""
        return self.zero is not None and 4 * self.zero % 1 == 0 and abs(self.zero) < 8

    @property
    def zero_operand(self) -> float:
        """The zero point as operators take it: a number, 0 where every group has its own."""
        return 0.0 if self.zero is None else self.zero

    def groups(self, k: int) -> int:
        """Number of scale groups along ``k`` input features.

        Raises:
            ValueError: ``k`` is not a multiple of the group size.
        """
        if self.group_size == -1:
            return 1
        if k % self.group_size:
            raise ValueError(f"k={k} is not a multiple of group_size={self.group_size}")
        return k // self.group_size

    def bits_per_weight(self, k: int) -> float:
        """Stored bits per weight of a [n, k] matrix before padding: 2 bits of code, 16 per scale, 16 per real zero."""
        per_group = 16 if self.zero is not None else 32
        return 2 + per_group * self.groups(k) / k
