"""Linear layers whose weight is on its 2-bit grid in every forward pass, and trainable all the same.

Rounding has no useful gradient, so it is passed straight through (Bengio et al. 2013): the forward pass computes with
the rounded weight, exactly as it will be stored, and the backward pass moves the latent weight behind it. Latent
weights are kept in steps of the grid, so that one learning rate means the same in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trirun_kernels import QuantSpec
from trirun_kernels.gemm.reference import int8_round_trip

from ..block.trainable import MARGIN
from ..layer.quantized import Quantized
from ..layer.scale_search import MIN_SCALE

MIN_ABSMEAN = 1e-5  # as BitNet's weight_quant: a matrix of zeros keeps a scale


class TrainedLinear(nn.Module):
    """``x @ weight.T + bias`` with a quantized weight that is trained. Subclasses say what the grid is.

    Args:
        layer: the layer it takes the place of; gives the shape and the bias.
        activation_bits: 16, or 8 to quantize x per token to int8 as the kernels do.
    """

    latent: nn.Parameter  # float32 [n, k], in steps of the grid
    base: Tensor  # what a step is at the start; broadcasts against the groups

    def __init__(self, layer: nn.Linear, activation_bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.activation_bits = activation_bits
        self.bias = layer.bias

    def weight(self) -> Tensor:
        """The quantized weight, float32 [n, k], differentiable."""
        raise NotImplementedError

    def harden(self) -> Quantized:
        """The present state as it will be stored; ``harden().dequantize()`` equals ``weight()``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k] → [..., n]."""
        if self.activation_bits == 8:
            x = _straight_through(x, int8_round_trip(x.float()).to(x.dtype))
        return F.linear(x, self.weight(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, act_bits={self.activation_bits}"


class LearnedLinear(TrainedLinear):
    """Codes ``clamp(round(v + z), 0, levels − 1)`` of latents v, and a trained scale per group (LSQ, Esser et al.
    2020).

    The scale's gradient is exact; a latent's is passed through the rounding and stops where the code is clamped.

    Args:
        spec: the grid. levels: 4, or 3 for ternary.
    """

    def __init__(self, layer: nn.Linear, activation_bits: int, spec: QuantSpec, levels: int) -> None:
        super().__init__(layer, activation_bits)
        self.spec, self.levels = spec, levels
        n, k, groups = self.out_features, self.in_features, spec.groups(self.in_features)
        device = layer.weight.device
        self.latent = nn.Parameter(torch.zeros(n, k, device=device))
        self.multiplier = nn.Parameter(torch.ones(n, groups, device=device))
        constant = torch.full((n, groups), spec.zero or 0.0, device=device)
        self.zeros = nn.Parameter(constant, requires_grad=spec.zero is None)
        self.register_buffer("base", torch.ones(n, groups, device=device))

    @torch.no_grad()
    def begin(self, start: Quantized, original: Tensor) -> None:
        """Start at ``start``, each latent as near to the original float weight [n, k] as its code allows."""
        self.base.copy_(start.scales)
        if start.zeros is not None:
            self.zeros.copy_(start.zeros)
        codes = self._grouped(start.codes.to(self.base.device).float()) - self.zeros.unsqueeze(-1)
        wanted = self._grouped(original.to(self.base)) / self.base.unsqueeze(-1)
        self.latent.copy_((codes + (wanted - codes).clamp_(-MARGIN, MARGIN)).view_as(self.latent))

    def weight(self) -> Tensor:
        zeros = self._stored_zeros().unsqueeze(-1)
        inside = (self._grouped(self.latent) + zeros).clamp(-0.5, self.levels - 0.5)
        codes = _straight_through(inside, inside.round().clamp(0, self.levels - 1))
        return (self._stored_scales().unsqueeze(-1) * (codes - zeros)).view_as(self.latent)

    @torch.no_grad()
    def harden(self) -> Quantized:
        zeros = self._stored_zeros()
        codes = (self._grouped(self.latent) + zeros.unsqueeze(-1)).round().clamp(0, self.levels - 1)
        stored = zeros.to(torch.float16) if self.spec.zero is None else None
        scales = self._stored_scales().to(torch.float16)
        return Quantized(codes.to(torch.uint8).view_as(self.latent), scales, stored, self.spec)

    def _grouped(self, weight: Tensor) -> Tensor:
        return weight.view(*self.base.shape, -1)

    def _stored_scales(self) -> Tensor:
        scales = self.base * self.multiplier
        away = torch.where(scales < 0, -1.0, 1.0) * scales.abs().clamp_min(MIN_SCALE)
        return _straight_through(scales, away.to(torch.float16).float())

    def _stored_zeros(self) -> Tensor:
        if self.spec.zero is not None:
            return self.zeros
        # As scale_search.store_zeros: beyond ±1024 fp16 no longer resolves a code.
        return _straight_through(self.zeros, self.zeros.clamp(-1024, 1024).to(torch.float16).float())


class AbsmeanLinear(TrainedLinear):
    """``γ · clamp(round(w / γ), −1, 1)`` with ``γ = mean|w|`` over the matrix: TriLM's and BitNet b1.58's weight.

    The gradient is passed through whole, clamped weights included, as in both papers' code. A latent is w in units of
    the γ that training began with.
    """

    spec = QuantSpec(-1, 1.0)

    def __init__(self, layer: nn.Linear, activation_bits: int) -> None:
        super().__init__(layer, activation_bits)
        device = layer.weight.device
        self.latent = nn.Parameter(torch.zeros(self.out_features, self.in_features, device=device))
        self.register_buffer("base", torch.ones(1, 1, device=device))

    @torch.no_grad()
    def begin(self, original: Tensor) -> None:
        """Start at the original float weight [n, k]."""
        original = original.to(self.latent)
        self.base.fill_(original.abs().mean().clamp_min(MIN_ABSMEAN))
        self.latent.copy_(original / self.base)

    def weight(self) -> Tensor:
        trits, scale = self._quantize()
        return _straight_through(self.latent * self.base, trits * scale)

    @torch.no_grad()
    def harden(self) -> Quantized:
        trits, scale = self._quantize()
        scales = scale.to(torch.float16).expand(self.out_features, 1).contiguous()
        return Quantized((trits + 1).to(torch.uint8), scales, None, self.spec)

    def _quantize(self) -> tuple[Tensor, Tensor]:
        """Trits [n, k] and their fp16-exact scale [1, 1]."""
        mean = self.latent.detach().abs().mean().clamp_min(MIN_ABSMEAN)
        scale = (mean * self.base).clamp_min(MIN_SCALE).to(torch.float16).float()
        return (self.latent.detach() / mean).round().clamp(-1, 1), scale


def _straight_through(smooth: Tensor, rounded: Tensor) -> Tensor:
    """The value of ``rounded`` with the gradient of ``smooth`` (straight-through, Bengio et al. 2013)."""
    return _Through.apply(smooth, rounded)


class _Through(torch.autograd.Function):
    # smooth + (rounded − smooth).detach() would not be exactly ``rounded`` in floating point.
    @staticmethod
    def forward(ctx: Any, smooth: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
