"""The packed drop-in for ``nn.Embedding``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..weights.packing import PackedWeight, dequantize, dequantize_rows
from ..weights.shapes import stored_shapes
from ..weights.spec import QuantSpec


class Int2Embedding(nn.Module):
    """``y = w[ids]`` of a packed weight [num_embeddings, embedding_dim].

    Its state is that of :class:`~trirun_kernels.gemm.linear.Int2Linear`, so that a head can share it.

    Args:
        num_embeddings, embedding_dim: n and k, the true shape. spec: the grid.
        dtype: of the result. device: of every tensor.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        spec: QuantSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.spec, self.dtype = spec, dtype
        words, groups = stored_shapes(num_embeddings, embedding_dim, spec)

        def buffer(shape: tuple[int, ...], kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        self.weight = buffer(words, torch.int32)
        self.weight_scale = buffer(groups, torch.float16)
        self.weight_zero = buffer(groups, torch.float16) if spec.zero is None else None

    @property
    def packed(self) -> PackedWeight:
        """The weight as the functional API takes it."""
        zeros = None if self.weight_zero is None else self.weight_zero.data
        return PackedWeight(
            self.weight.data, self.weight_scale.data, zeros, self.num_embeddings, self.embedding_dim, self.spec
        )

    def to_dense(self, dtype: torch.dtype = torch.float32) -> nn.Embedding:
        """The same layer with a dense [n, k] tensor."""
        return nn.Embedding.from_pretrained(dequantize(self.packed, dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: integers [...] → [..., embedding_dim]."""
        return dequantize_rows(self.packed, ids, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.spec}"
