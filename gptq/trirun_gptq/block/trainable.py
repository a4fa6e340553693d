"""Codes and scales of one weight as something to train, by one of two methods, both started at the GPTQ solution.

``ste``: every weight has a latent value whose rounding is its code, trained straight-through (Bengio et al. 2013;
Block-AP of EfficientQAT, Chen et al. 2024). ``gumbel``: every weight has a distribution over its four codes, sampled
while training and more and more certain (Jang et al. 2017, "Gumbel-softmax"; GSQ, IST-DASLab 2026). Scales of either
train as multipliers of the scales at the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer.quantized import Quantized
from ..layer.scale_search import store_scales, store_zeros

MARGIN = 0.49  # how far from its code a latent may start: nearer to the original weight, but not across the boundary
# Logits of code q for a latent v start at −½·sharpness·(v − q)², so sharp that the noise moves only weights near the
# middle between two codes (a flatter start loses what GPTQ compensated for: gptq/README.md). They grow by the certainty
# until the end, at temperatures that fall from the one to the other.
SHARPNESS = 150.0
CERTAINTY = 3.0
TEMPERATURES = (1.0, 0.2)
LOGIT_RATE = SHARPNESS  # learning rate of logits beside that of latents: what a latent's step does to its logits


class Trainable(nn.Module):
    """Scales, zeros and codes of one linear layer's weight while they are trained. Subclasses say what the codes are.

    Where it is a parametrization of a layer's weight, its input is ignored. In training mode the forward pass may be
    soft or noisy; in evaluation mode it is what :meth:`harden` would store, up to the rounding of scales to fp16.

    Attributes:
        base: float32 [n, groups], the scales at the start. multiplier: float32 [n, groups], trained, 1 at the start.
        zeros: float32 [n, groups], trained where the grid has real zeros.

    Args:
        start: where training starts. levels: how many codes are in use, 4, or 3 for a ternary grid.
    """

    rate = 1.0  # of the codes' parameter, beside the recipe's
    noise: torch.Generator | None = None  # of the forward pass, where it is noisy

    def __init__(self, start: Quantized, levels: int) -> None:
        super().__init__()
        self.spec, self.levels = start.spec, levels
        self.base = start.scales.float()
        constant = torch.full_like(self.base, 0.0 if start.spec.zero is None else start.spec.zero)
        self.zeros = nn.Parameter(constant if start.zeros is None else start.zeros.float())
        self.zeros.requires_grad_(start.zeros is not None)
        self.multiplier = nn.Parameter(torch.ones_like(self.base))

    def code_parameters(self) -> list[nn.Parameter]:
        """What decides the codes; empty where they stay as they are."""
        raise NotImplementedError

    def hard_codes(self) -> Tensor:
        """The codes at present, float or uint8 [n, groups, size]."""
        raise NotImplementedError

    def schedule(self, progress: float) -> None:
        """Told before every step how much of the training is done, 0..1."""

    def scale_parameters(self) -> list[nn.Parameter]:
        """Multipliers of the scales, and the zeros where they are real."""
        return [parameter for parameter in (self.multiplier, self.zeros) if parameter.requires_grad]

    @torch.no_grad()
    def harden(self) -> Quantized:
        """The present state as it would be stored."""
        scales = store_scales(self.base * self.multiplier)
        zeros = None if self.spec.zero is not None else store_zeros(self.zeros)
        codes = self.hard_codes()
        return Quantized(codes.to(torch.uint8).view(codes.shape[0], -1), scales, zeros, self.spec)

    def _latent(self, start: Quantized, weight: Tensor, margin: float = MARGIN) -> Tensor:
        """Codes [n, groups, size], each moved towards the unquantized weight, by ``margin`` at most."""
        n, groups = self.base.shape
        codes = start.codes.view(n, groups, -1).float()
        wanted = weight.view(n, groups, -1) / self.base.unsqueeze(-1) + self.zeros.detach().unsqueeze(-1)
        return codes + (wanted - codes).clamp(-margin, margin)


class FixedCodes(Trainable):
    """Codes that stay as they are: scales, and real zeros, train alone.

    Attributes:
        grouped: uint8 [n, groups, size].
    """

    def __init__(self, start: Quantized) -> None:
        super().__init__(start, levels=4)
        self.grouped = start.codes.view(*start.scales.shape, -1)

    def code_parameters(self) -> list[nn.Parameter]:
        return []

    def hard_codes(self) -> Tensor:
        return self.grouped


class StraightThrough(Trainable):
    """Method ``ste``: code ``clamp(round(v + z), 0, levels − 1)`` of a latent v, in steps of the grid.

    The gradient passes straight through the rounding and stops where the code is clamped (Bengio et al. 2013, §4).

    Args:
        weight: the unquantized weight, float32 [n, k]. margin: how far from its code a latent may start.
        noise: unused; the methods are made alike.
    """

    def __init__(
        self,
        start: Quantized,
        weight: Tensor,
        levels: int,
        noise: torch.Generator | None = None,
        margin: float = MARGIN,
    ) -> None:
        super().__init__(start, levels)
        self.latent = nn.Parameter(self._latent(start, weight, margin) - self.zeros.detach().unsqueeze(-1))

    def code_parameters(self) -> list[nn.Parameter]:
        return [self.latent]

    def hard_codes(self) -> Tensor:
        return (self.latent + self.zeros.unsqueeze(-1)).round().clamp(0, self.levels - 1)

    def forward(self, weight: Tensor) -> Tensor:
        """The quantized weight, float32, in the shape of ``weight`` [n, k], whose values are ignored."""
        return _Grid.apply(self.latent, self.base * self.multiplier, self.zeros, self.levels).view_as(weight)


class Gumbel(Trainable):
    """Method ``gumbel``: the mean of the grid's codes under ``softmax((logits + g) / τ)``, g Gumbel noise and τ a
    temperature that falls (Jang et al. 2017, eq. 2). Four logits per weight: four times the memory of ``ste``.

    Args:
        weight: the unquantized weight, float32 [n, k]. noise: of the forward pass, on the weight's device.
    """

    rate = LOGIT_RATE

    def __init__(self, start: Quantized, weight: Tensor, levels: int, noise: torch.Generator) -> None:
        super().__init__(start, levels)
        latent = self._latent(start, weight)
        grid = torch.arange(levels, device=latent.device).view(-1, 1, 1, 1)
        self.logits = nn.Parameter(-0.5 * SHARPNESS * (latent - grid).square())  # [levels, n, groups, size]
        self.noise = noise
        # Tensors, so that a recorded step reads what they are by then.
        self.temperature, self.certainty = (torch.ones((), device=latent.device) for _ in range(2))
        self.schedule(0.0)

    def code_parameters(self) -> list[nn.Parameter]:
        return [self.logits]

    def hard_codes(self) -> Tensor:
        return self.logits.argmax(0).float()

    def schedule(self, progress: float) -> None:
        first, last = TEMPERATURES
        self.temperature.fill_(first * (last / first) ** progress)
        self.certainty.fill_(CERTAINTY**progress)

    def forward(self, weight: Tensor) -> Tensor:
        """The soft, or in evaluation mode hard, weight, float32, in the shape of ``weight`` [n, k]."""
        if self.training:
            # −log of an exponential variable is a Gumbel one.
            noise = torch.empty_like(self.logits).exponential_(generator=self.noise).clamp_min_(1e-20).log_()
            shares = ((self.logits * self.certainty - noise) / self.temperature).softmax(0)
            code = sum(shares[level] * level for level in range(1, self.levels))
        else:
            code = self.hard_codes()
        dense = (code - self.zeros.unsqueeze(-1)) * (self.base * self.multiplier).unsqueeze(-1)
        return dense.view_as(weight)


METHODS: dict[str, type[StraightThrough] | type[Gumbel]] = {"ste": StraightThrough, "gumbel": Gumbel}


class _Grid(torch.autograd.Function):
    """``s·(clamp(round(v + z)) − z)`` with straight-through gradients to v [n, groups, size], exact ones to s and z."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, scales: Tensor, zeros: Tensor, levels: int) -> Tensor:
        shifted = latent + zeros.unsqueeze(-1)
        codes = shifted.round().clamp_(0, levels - 1)
        inside = (shifted >= -0.5) & (shifted <= levels - 0.5)
        centred = codes.sub_(zeros.unsqueeze(-1))
        ctx.save_for_backward(centred, inside, scales)
        return centred * scales.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        centred, inside, scales = ctx.saved_tensors
        grad_scales = (grad * centred).sum(-1)
        grad_zeros = -(grad * ~inside).sum(-1) * scales if ctx.needs_input_grad[2] else None
        return grad * inside * scales.unsqueeze(-1), grad_scales, grad_zeros, None
