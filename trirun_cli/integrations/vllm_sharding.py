"""How one rank of a tensor-parallel group holds its part of a packed layer; arithmetic alone, without vLLM.

vLLM gives a rank rows of the layers that it merges (q, k and v; gate and up) and of the vocabulary, or columns where
the input is split (o, down). Words are stored as [n tiles of 64 rows, k blocks of 32 columns, 128], so that a part of
whole tiles and blocks is a slice of what is stored. A part that cuts a tile goes through plain codes, one byte each,
and is packed again when all of it has been read. A part that cuts a scale group gets smaller groups with the same
scale, and so do merged layers of other groups than their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from trirun_kernels.weights.layout import natural_order, untile_codes
from trirun_kernels.weights.packing import PackedWeight, pack
from trirun_kernels.weights.shapes import K_BLOCK, N_TILE, filler_code, padded
from trirun_kernels.weights.spec import QuantSpec


def common_spec(specs: Sequence[QuantSpec]) -> QuantSpec:
    """The grid that holds the weights of all of these: the smallest groups, and real zeros where zero points differ."""
    sizes = {spec.group_size for spec in specs}
    zeros = {spec.zero for spec in specs}
    return QuantSpec(min(sizes - {-1}, default=-1), zeros.pop() if len(zeros) == 1 else None)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a packed layer, or of several that are merged along n.

    Attributes:
        n, k: the part's rows and columns.
        spec: its grid: the layer's, with smaller groups where its columns cut a group.
        tiled: it is read as stored: words [n tiles, k blocks, 128], groups [groups, n] in n-tile order. Otherwise
            codes uint8 [n, k] and groups [n, groups].
        whole_k: the columns of all ranks.
    """

    n: int
    k: int
    spec: QuantSpec
    tiled: bool
    whole_k: int

    @classmethod
    def of(cls, rows: Sequence[int], k: int, whole_k: int, spec: QuantSpec, *, tiled: bool = True) -> Shard:
        """The part of one rank.

        Args:
            rows: its rows of each merged layer. k: its columns. whole_k: the columns of all ranks.
            spec: the layer's grid. tiled: whether the part may be read as stored.

        Raises:
            ValueError: its columns end within the smallest group that kernels have.
        """
        group = spec.group_size
        if group != -1 and k % group:
            fitting = [size for size in (64, 32) if size < group and k % size == 0]
            if not fitting:
                raise ValueError(f"{k} of {whole_k} columns on a rank do not divide into groups of 32")
            group = fitting[0]
        tiled = tiled and all(count % N_TILE == 0 for count in rows) and not (k != whole_k and k % K_BLOCK)
        return cls(sum(rows), k, QuantSpec(group, spec.zero), tiled, whole_k)

    @property
    def splits_k(self) -> bool:
        """Whether the layer has more columns, on other ranks."""
        return self.k != self.whole_k

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the words or codes that a rank reads."""
        if not self.tiled:
            return self.n, self.k
        return self.n // N_TILE, self._stored_k // K_BLOCK, 4 * K_BLOCK

    @property
    def groups_shape(self) -> tuple[int, int]:
        """Of the scales that a rank reads, and of the zeros."""
        if not self.tiled:
            return self.n, self.spec.groups(self.k)
        return self.spec.groups(self._stored_k), self.n

    @property
    def _stored_k(self) -> int:
        return self.k if self.splits_k else padded(self.n, self.k)[1]

    def weight(self, words: Tensor) -> Tensor:
        """A stored weight in the form that a rank takes its slice of: words as they are, or codes uint8 [n, k], padded
        as they are stored. The slice is along dimensions 0 (tiles or rows) and 1 (blocks or columns)."""
        return words if self.tiled else untile_codes(words)

    def groups(self, stored: Tensor) -> Tensor:
        """Stored scales or zeros fp16 [groups, n] in the form that a rank takes its slice of."""
        repeat = self.spec.groups(padded(self.n, self.whole_k)[1]) // stored.shape[0]
        values = stored.repeat_interleave(repeat, dim=0) if repeat > 1 else stored
        return values if self.tiled else natural_order(values)

    def packed(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedWeight:
        """The rank's weight as kernels take it, from its slices: padded and contiguous.

        Raises:
            PackError: a scale is not finite.
        """
        if not self.tiled:
            return pack(weight, scales, self.spec, zeros)
        k_pad = padded(self.n, self.k)[1]
        # A byte of padding is four filler codes, 0x55 times one; an int32 is four bytes.
        filler = 0x55 * filler_code(self.spec)
        filler = int.from_bytes(bytes([filler] * 4), "little", signed=True)
        words = F.pad(weight, (0, 0, 0, k_pad // K_BLOCK - weight.shape[1]), value=filler)
        missing = self.spec.groups(k_pad) - scales.shape[0]

        def whole(groups: Tensor) -> Tensor:
            return F.pad(groups, (0, 0, 0, missing)).contiguous()

        stored_zeros = None if zeros is None else whole(zeros)
        return PackedWeight(words.contiguous(), whole(scales), stored_zeros, self.n, self.k, self.spec)
