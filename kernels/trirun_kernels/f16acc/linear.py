"""The drop-in for ``nn.Linear`` that multiplies with fp16 accumulation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .ops import f16acc_gemm


class Fp16AccLinear(nn.Linear):
    """``nn.Linear`` on :func:`trirun_kernels.f16acc.ops.f16acc_gemm`: same arguments, same state.

    The product runs in float16 whatever the dtypes: float32 parameters are masters, converted on every call as under
    autocast, and the result has x's dtype. Gradients pass through float16, so training wants loss scaling.

    Args:
        splits: into how many chunks k is cut; None leaves it to the operator.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        splits: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.splits = splits

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, splits: int | None = None) -> Fp16AccLinear:
        """A layer around the parameters of another; nothing is copied."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", splits=splits)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] → [..., out_features] in x's dtype."""
        half = torch.float16
        bias = None if self.bias is None else self.bias.to(half)
        return f16acc_gemm(x.to(half), self.weight.to(half), bias, splits=self.splits).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, splits={self.splits}"
