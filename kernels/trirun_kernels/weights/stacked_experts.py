"""One packed matrix of every expert of a mixture, side by side, as one launch of a kernel reads them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import PackedWeight, dequantize
from .spec import QuantSpec


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The same matrix of every expert, packed: gate and up one after the other, or down.

    Attributes:
        words: int32 [experts, n/64, k/32, 128]. scales: float16 [experts, k/g, n]. zeros: likewise or None.
        n: true rows of one part, of which there are ``parts``. k: true columns. spec: the grid of all.
        bias: float32 [experts, n padded] or None.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    parts: int
    spec: QuantSpec
    bias: Tensor | None = None

    @classmethod
    def of(
        cls, experts: Sequence[Sequence[PackedWeight]], biases: Sequence[Sequence[Tensor | None]] | None = None
    ) -> StackedExperts:
        """From every expert's parts, all of one shape and grid.

        Raises:
            ValueError: an expert's part has another shape or grid than the first one's.
        """
        first = experts[0][0]
        for index, parts in enumerate(experts):
            for part in parts:
                if (part.n, part.k, part.spec) != (first.n, first.k, first.spec):
                    raise ValueError(
                        f"experts: expert {index} is {[part.n, part.k]} of {part.spec}, "
                        f"expert 0 {[first.n, first.k]} of {first.spec}"
                    )
        words = torch.stack([torch.cat([part.words for part in parts]) for parts in experts])
        scales = torch.stack([torch.cat([part.scales for part in parts], 1) for parts in experts])
        zeros = None
        if first.zeros is not None:
            found = [torch.cat([part.zeros for part in parts if part.zeros is not None], 1) for parts in experts]
            zeros = torch.stack(found)
        bias = None
        if biases is not None and biases[0][0] is not None:
            n_pad = first.words.shape[0] * 64
            padded = [[F.pad(b.float(), (0, n_pad - first.n)) for b in parts if b is not None] for parts in biases]
            bias = torch.stack([torch.cat(each) for each in padded]).to(words.device)
        return cls(words, scales, zeros, first.n, first.k, len(experts[0]), first.spec, bias)

    def to(self, device: torch.device | str) -> StackedExperts:
        """The same on another device."""
        words, scales, zeros, bias = (
            None if t is None else t.to(device) for t in (self.words, self.scales, self.zeros, self.bias)
        )
        assert words is not None and scales is not None
        return StackedExperts(words, scales, zeros, self.n, self.k, self.parts, self.spec, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Dense weights [experts, parts·n, k], without padding."""
        n_pad = self.words.shape[1] // self.parts * 64
        out = torch.empty(self.experts, self.parts * self.n, self.k, dtype=dtype, device=self.words.device)
        for index in range(self.experts):
            zeros = None if self.zeros is None else self.zeros[index]
            whole = PackedWeight(self.words[index], self.scales[index], zeros, self.parts * n_pad, self.k, self.spec)
            rows = dequantize(whole, dtype).view(self.parts, n_pad, self.k)[:, : self.n]
            out[index] = rows.reshape(-1, self.k)
        return out

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.words.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(t.nbytes for t in (self.words, self.scales, self.zeros, self.bias) if t is not None)
