"""Block refinement: codes and scales of a whole block trained against the output of the original block.

GPTQ sees one layer at a time. Here all layers of a block move together to lower the error of what the block hands on
(Li et al. 2021, "BRECQ"; Cheng et al. 2023, "SignRound"; Chen et al. 2024, "EfficientQAT", Block-AP). Every weight has
a latent v with code ``clamp(round(v + zero))``, trained straight-through; every group's scale has a multiplier. Both
start at the GPTQ solution, so the first state is exactly what came in; the best state on held-out sequences is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .activations import Batch, compute, run_block
from .grid import store_scales, store_zeros
from .quantized import Quantized
from .recipe import Recipe

EVALUATIONS = 8  # times per run that the held-out error is measured
WARMUP = 0.1  # fraction of the steps over which learning rates rise: the first Adam steps know nothing but signs
MARGIN = 0.49  # how far from its code a latent may start: nearer to the original weight, but not across the boundary


class _Grid(torch.autograd.Function):
    """``s·(clamp(round(v + z)) − z)`` with straight-through gradients to v, and exact ones to s and z."""

    @staticmethod
    def forward(ctx, latent, scales, zeros, levels):
        n, groups = scales.shape
        shifted = latent.view(n, groups, -1) + zeros.unsqueeze(-1)
        codes = shifted.round().clamp_(0, levels - 1)
        inside = (shifted >= -0.5) & (shifted <= levels - 0.5)
        centred = codes.sub_(zeros.unsqueeze(-1))
        ctx.save_for_backward(centred, inside, scales)
        return (centred * scales.unsqueeze(-1)).view_as(latent)

    @staticmethod
    def backward(ctx, grad):
        centred, inside, scales = ctx.saved_tensors
        n, groups = scales.shape
        grad = grad.view(n, groups, -1)
        grad_scales = (grad * centred).sum(-1)
        grad_zeros = -(grad * ~inside).sum(-1) * scales if ctx.needs_input_grad[2] else None
        grad_latent = (grad * inside * scales.unsqueeze(-1)).view(n, -1)
        return grad_latent, grad_scales, grad_zeros, None


class _Trainable(nn.Module):
    """The parametrization of one linear layer's weight while its block is trained."""

    def __init__(self, start: Quantized, weight: Tensor, levels: int) -> None:
        super().__init__()
        self.spec, self.levels = start.spec, levels
        self.base = start.scales.float()
        constant = torch.full_like(self.base, 0.0 if start.spec.zero is None else start.spec.zero)
        self.zeros = nn.Parameter(constant if start.zeros is None else start.zeros.float())
        self.zeros.requires_grad_(start.zeros is not None)
        self.multiplier = nn.Parameter(torch.ones_like(self.base))
        n, groups = self.base.shape
        centred = start.codes.view(n, groups, -1).float() - self.zeros.detach().unsqueeze(-1)
        wanted = weight.view(n, groups, -1) / self.base.unsqueeze(-1)
        self.latent = nn.Parameter((centred + (wanted - centred).clamp(-MARGIN, MARGIN)).view(n, -1))

    def forward(self, _: Tensor) -> Tensor:
        return _Grid.apply(self.latent, self.base * self.multiplier, self.zeros, self.levels)

    @torch.no_grad()
    def harden(self) -> Quantized:
        """The present state as it would be stored."""
        scales = store_scales(self.base * self.multiplier)
        zeros = None if self.spec.zero is not None else store_zeros(self.zeros)
        n, groups = self.base.shape
        shifted = self.latent.view(n, groups, -1) + self.zeros.unsqueeze(-1)
        codes = shifted.round().clamp(0, self.levels - 1).to(torch.uint8).view(n, -1)
        return Quantized(codes, scales, zeros, self.spec)


def block_error(
    block: nn.Module, index: int, batches: list[Batch], targets: list[Tensor], device: torch.device
) -> float:
    """Relative squared error of the block's output on the quantized stream against the original outputs."""
    wrong = whole = 0.0
    with torch.no_grad(), compute(device):
        for batch, target in zip(batches, targets, strict=True):
            out = run_block(block, index, batch, batch.quantized).float()
            wrong += float((out - target).square().sum())
            whole += float(target.square().sum())
    return wrong / whole if whole else 0.0


def refine_block(
    block: nn.Module,
    index: int,
    layers: dict[str, nn.Linear],
    start: dict[str, Quantized],
    originals: dict[str, Tensor],
    ternary: set[str],
    train: tuple[list[Batch], list[Tensor]],
    held_out: tuple[list[Batch], list[Tensor]],
    recipe: Recipe,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Quantized], float, float]:
    """Train a block's codes and scales; the block's weights are left at the state returned.

    Args:
        layers: the block's quantized linear layers by name. start: their GPTQ solutions. originals: float32 weights.
        ternary: names whose grid leaves code 3 unused.
        train, held_out: batches and the original block's outputs on ``batch.original``.
        progress: called with (steps done, steps).

    Returns:
        The best state, its held-out error, and the error before. The state is ``start`` where nothing was better.
    """
    before = block_error(block, index, *held_out, device)
    best, best_error = start, before
    adapters = {
        name: _Trainable(start[name], originals[name], 3 if name in ternary else 4).to(device) for name in layers
    }
    for name, layer in layers.items():
        parametrize.register_parametrization(layer, "weight", adapters[name], unsafe=True)
    groups = [
        {"params": [a.latent for a in adapters.values()], "lr": recipe.refine_lr},
        {
            "params": [p for a in adapters.values() for p in (a.multiplier, a.zeros) if p.requires_grad],
            "lr": recipe.refine_scale_lr,
        },
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), foreach=True)
    rates = [group["lr"] for group in groups]
    order = _sample_order(train[0], recipe, index)
    steps = recipe.refine_steps
    interval = max(1, steps // EVALUATIONS)
    for step in range(steps):
        factor = min(1.0, (step + 1) / (WARMUP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        b = order[step]
        batch, target = train[0][b], train[1][b]
        with compute(device):
            out = run_block(block, index, batch, batch.quantized)
        loss = (out.float() - target).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % interval == 0 or step + 1 == steps:
            error = block_error(block, index, *held_out, device)
            if error < best_error:
                best, best_error = {name: adapter.harden() for name, adapter in adapters.items()}, error
        progress(step + 1, steps)
    for name, layer in layers.items():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        layer.weight = nn.Parameter(best[name].dequantize(), requires_grad=False)
    # What is stored has fp16 scales: its own error decides, not that of the float32 state it came from.
    stored_error = block_error(block, index, *held_out, device)
    if best is not start and stored_error >= before:
        for name, layer in layers.items():
            layer.weight = nn.Parameter(start[name].dequantize(), requires_grad=False)
        return start, before, before
    return best, stored_error, before


def _sample_order(batches: list[Batch], recipe: Recipe, index: int) -> list[int]:
    """Which batch each step trains on: seeded epochs without repetition."""
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + index)
    order: list[int] = []
    while len(order) < recipe.refine_steps:
        order += torch.randperm(len(batches), generator=generator).tolist()
    return order
