"""The packed drop-in for ``nn.Linear``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..f16acc.int2 import FEWEST_ROWS
from ..weights.packing import PackedWeight, dequantize
from ..weights.shapes import stored_shapes
from ..weights.spec import QuantSpec
from .ops import int2_gemm


class Int2Linear(nn.Module):
    """``y = x @ w.T + bias`` on a packed weight.

    Its state holds exactly what a checkpoint holds: ``weight`` int32 [n/64, k/32, 128], ``weight_scale`` fp16
    [k/g, n], ``weight_zero`` likewise where the grid has real zeros, and ``bias`` [n].

    Args:
        in_features, out_features: k and n, the true shape.
        spec: the grid.
        bias: whether there is one.
        act_bits: 16 or 8, see :func:`trirun_kernels.gemm.ops.int2_gemm`.
        dtype: of the bias. device: of every tensor.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        spec: QuantSpec,
        bias: bool = False,
        act_bits: int = 16,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.spec, self.act_bits = spec, act_bits
        self.acc = "fp32"  # "fp16": products with rows enough to gain may add in fp16
        words, groups = stored_shapes(out_features, in_features, spec)

        def buffer(shape: tuple[int, ...], kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        self.weight = buffer(words, torch.int32)
        self.weight_scale = buffer(groups, torch.float16)
        self.weight_zero = buffer(groups, torch.float16) if spec.zero is None else None
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_packed(cls, w: PackedWeight, bias: Tensor | None = None, act_bits: int = 16) -> Int2Linear:
        """A layer around tensors that exist already; nothing is copied."""
        layer = cls(w.k, w.n, w.spec, act_bits=act_bits, device="meta")
        layer.weight = nn.Parameter(w.words, requires_grad=False)
        layer.weight_scale = nn.Parameter(w.scales, requires_grad=False)
        if w.zeros is not None:
            layer.weight_zero = nn.Parameter(w.zeros, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        return layer

    @property
    def packed(self) -> PackedWeight:
        """The weight as the functional API takes it."""
        zeros = None if self.weight_zero is None else self.weight_zero.data
        return PackedWeight(
            self.weight.data, self.weight_scale.data, zeros, self.out_features, self.in_features, self.spec
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense [n, k] weight."""
        return dequantize(self.packed, dtype)

    def to_dense(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """The same layer with its weight as a dense [n, k] tensor; the bias is shared."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.dequantize(dtype), requires_grad=False)
        dense.register_parameter("bias", self.bias)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] → [..., out_features]."""
        half = self.acc == "fp16" and self.act_bits == 16 and x.dtype == torch.float16
        if half and x.numel() >= FEWEST_ROWS * self.in_features:
            return int2_gemm(x, self.packed, self.bias, acc="fp16")
        return int2_gemm(x, self.packed, self.bias, act_bits=self.act_bits)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.spec}, act_bits={self.act_bits}"
        )
