"""What all training here shares: the order of the batches, the learning rate, the optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..model.activations import BATCH_TOKENS, Batch

WARMUP = 0.1  # fraction of the steps over which learning rates rise: the first Adam steps know nothing but signs
BETAS = (0.9, 0.95)


def step_batches(batches: list[Batch], steps: int, seed: int) -> list[list[int]]:
    """Which batches each step trains on, about 4096 tokens together: seeded epochs without repetition."""
    generator = torch.Generator().manual_seed(seed)
    order: list[list[int]] = []
    while len(order) < steps:
        tokens = BATCH_TOKENS  # an epoch begins with a step of its own
        for b in torch.randperm(len(batches), generator=generator).tolist():
            size = batches[b].tokens.numel()
            # A step ends where the next batch would take it further past the mark than it is short of it.
            if tokens + size / 2 > BATCH_TOKENS:
                order.append([])
                tokens = 0
            order[-1].append(b)
            tokens += size
    return order[:steps]


def rate_factor(step: int, steps: int) -> float:
    """The learning rate of a step as a fraction of its peak: a short linear rise, then a cosine to zero."""
    return min(1.0, (step + 1) / (WARMUP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Adam:
    """Adam (Kingma & Ba 2015) whose rates follow :func:`rate_factor`; on a GPU one kernel, which reads its rates from
    the device, so that a recorded step (:mod:`trirun_gptq.block.cuda_graph`) follows them too.

    Args:
        groups: parameters (``params``) and the peak of their rate (``lr``), as ``torch.optim`` takes them.
    """

    def __init__(self, groups: list[dict], device: torch.device) -> None:
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self._peaks = [group["lr"] for group in groups]
        if device.type == "cuda":
            groups = [{**group, "lr": torch.tensor(group["lr"], device=device)} for group in groups]
            self._adam = torch.optim.Adam(groups, betas=BETAS, fused=True, capturable=True)
        else:
            self._adam = torch.optim.Adam(groups, betas=BETAS, foreach=True)

    def schedule(self, step: int, steps: int) -> None:
        """Set the rates of a step."""
        for group, peak in zip(self._adam.param_groups, self._peaks, strict=True):
            rate = peak * rate_factor(step, steps)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Move the parameters."""
        self._adam.step()
