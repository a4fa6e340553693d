"""The quantized model while it is trained as a whole: layers of fixed codes, and layers whose codes train too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..block.trainable import StraightThrough
from ..layer.quantized import Quantized
from ..layer.scale_search import store_scales, store_zeros

# How far from its code a latent may start. Further from the boundary than in one block (trainable.MARGIN): these codes
# have been trained already, and the first steps, which know nothing but signs, flip what lies near it.
MARGIN = 0.3


class CodedLinear(nn.Module):
    """A linear layer whose codes train as well as its scales: the engine ``ste`` of :mod:`trirun_gptq.block.trainable`.

    Args:
        weight: where it starts. original: the unquantized weight, float32 [n, k]. levels: 4, or 3 for ternary.
    """

    def __init__(self, weight: Quantized, original: Tensor, bias: Tensor | None, levels: int) -> None:
        super().__init__()
        self.bias, self.shape = bias, torch.empty(original.shape, device="meta")
        self.adapter = StraightThrough(weight, original, levels, margin=MARGIN)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.adapter(self.shape), self.bias)

    def codes(self) -> list[nn.Parameter]:
        """What decides the codes."""
        return [self.adapter.codes()]

    def scales(self) -> list[nn.Parameter]:
        """Multipliers of the scales, and the zeros where they are real."""
        return self.adapter.scale_parameters()

    def harden(self) -> Quantized:
        """As it would be stored."""
        return self.adapter.harden()


class ScaledLinear(nn.Module):
    """A linear layer of fixed codes and trainable scales, weight ``s·(q − zero)``.

    Keeps a byte per weight; the dense weight exists during its own product only.
    """

    grouped: Tensor  # uint8 [n, groups, group_size]
    base: Tensor  # float32 [n, groups]

    def __init__(self, weight: Quantized, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        self.spec, self.bias = weight.spec, bias
        n, groups = weight.scales.shape
        self.register_buffer("grouped", weight.codes.view(n, groups, -1).to(device), persistent=False)
        self.register_buffer("base", weight.scales.to(device).float(), persistent=False)
        self.multiplier = nn.Parameter(torch.ones_like(self.base))
        zeros = torch.full_like(self.base, weight.spec.zero or 0.0) if weight.zeros is None else weight.zeros.to(device)
        self.zeros = nn.Parameter(zeros.float(), requires_grad=weight.zeros is not None)

    def forward(self, x: Tensor) -> Tensor:
        out = _ScaledProduct.apply(x, self.grouped, self.base * self.multiplier, self.zeros)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def codes(self) -> list[nn.Parameter]:
        """None of them trains."""
        return []

    def scales(self) -> list[nn.Parameter]:
        """Multipliers of the scales, and the zeros where they are real."""
        return [parameter for parameter in (self.multiplier, self.zeros) if parameter.requires_grad]

    @torch.no_grad()
    def harden(self) -> Quantized:
        """As it would be stored."""
        zeros = None if self.spec.zero is not None else store_zeros(self.zeros)
        codes = self.grouped.view(self.grouped.shape[0], -1)
        return Quantized(codes, store_scales(self.base * self.multiplier), zeros, self.spec)


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
