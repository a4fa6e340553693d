"""The linear layers of the quantized model while it is trained as a whole: only their scales train, or codes too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..block.trainable import FixedCodes, StraightThrough, Trainable
from ..layer.quantized import Quantized

# How far from its code a latent may start. Further from the boundary than in one block (trainable.MARGIN): these codes
# have been trained already, and the first steps, which know nothing but signs, flip what lies near it.
MARGIN = 0.3


class StudentLinear(nn.Module):
    """A linear layer whose quantized weight trains, ``x [..., k] → [..., n]``. Subclasses say how it is multiplied.

    Attributes:
        trainable: scales, zeros and codes.
    """

    def __init__(self, trainable: Trainable, bias: Tensor | None) -> None:
        super().__init__()
        self.trainable, self.bias = trainable, bias

    def harden(self) -> Quantized:
        """As it would be stored."""
        return self.trainable.harden()


class CodedLinear(StudentLinear):
    """A linear layer whose codes train as well as its scales, straight-through.

    Args:
        start: where it starts. original: the unquantized weight, float32 [n, k]. levels: 4, or 3 for ternary.
    """

    def __init__(self, start: Quantized, original: Tensor, bias: Tensor | None, levels: int) -> None:
        super().__init__(StraightThrough(start, original, levels, margin=MARGIN), bias)
        self._shape = torch.empty(original.shape, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k] → [..., n]."""
        return F.linear(x, self.trainable(self._shape), self.bias)


class ScaledLinear(StudentLinear):
    """A linear layer of fixed codes and trainable scales, weight ``s·(q − zero)``.

    Keeps a byte per weight; the dense weight exists during its own product only.

    Args:
        start: where it starts, on the device of the computation.
    """

    trainable: FixedCodes

    def __init__(self, start: Quantized, bias: Tensor | None) -> None:
        super().__init__(FixedCodes(start), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k] → [..., n]."""
        weight = self.trainable
        out = _ScaledProduct.apply(x, weight.grouped, weight.base * weight.multiplier, weight.zeros)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _ScaledProduct(torch.autograd.Function):
    """``x·Wᵀ`` with gradients to x, scales and zeros; the dense W is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grouped: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        ctx.save_for_backward(x.to(dtype), grouped, scales, zeros)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), _dense(grouped, scales, zeros, dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor | None]:
        x, grouped, scales, zeros = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_x = grad @ _dense(grouped, scales, zeros, x.dtype)
        grad_weight = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).view_as(grouped).float()
        grad_scales = (grad_weight * (grouped - zeros.unsqueeze(-1))).sum(-1)
        grad_zeros = -scales * grad_weight.sum(-1) if ctx.needs_input_grad[3] else None
        return grad_x, None, grad_scales, grad_zeros


def _dense(grouped: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    return ((grouped - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).to(dtype).view(grouped.shape[0], -1)
