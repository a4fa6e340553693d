"""Distillation over a large vocabulary without ever holding all logits.

The last hidden states of both models are multiplied by their heads a few thousand tokens at a time; the gradient with
respect to the logits has a closed form, so each piece is finished and forgotten in the forward pass (the idea of the
fused linear cross-entropy of Liger Kernel, Hsu et al. 2024). Memory grows with the piece, not with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 27  # logits of one model that exist at a time, as a count of numbers
IGNORED = -1  # the label of a token whose successor is unknown

Terms = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor, Tensor]]


def terms(logits: Tensor, teacher: Tensor, labels: Tensor, kl: float, ce: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both losses of a piece, and the gradient of their weighted sum.

    Args:
        logits, teacher: [t, v] of the trained and of the original model.
        labels: int64 [t], or :data:`IGNORED`.
        kl, ce: weights.

    Returns:
        Σ KL(original ‖ trained) and Σ cross-entropy in nats, float32 scalars, and d(kl·KL + ce·CE)/d logits,
        float32 [t, v].
    """
    mine, original = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    wanted = original.exp()
    divergence = (wanted * (original - mine)).sum()
    known = (labels != IGNORED).float().unsqueeze(-1)
    # A comparison instead of a scatter: it fuses with the rest.
    hit = (torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)).float()
    entropy = -(hit * mine).sum()
    grad = (kl + ce * known) * mine.exp() - kl * wanted - ce * hit
    return divergence, entropy, grad


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        labels: Tensor,
        kl: float,
        ce: float,
        dtype: torch.dtype,
        piece_terms: Terms,
    ) -> tuple[Tensor, Tensor]:
        pieces = max(1, PIECE // head.shape[0])
        weight = head.to(dtype)
        # fp16 has no room for the sums of the head's gradient; those products run in float32 there.
        exact = torch.float32 if dtype == torch.float16 else dtype
        sums = hidden.new_zeros(2, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), pieces):
                part = slice(start, start + pieces)
                mine = hidden[part].to(dtype)
                original = teacher_hidden[part] @ teacher_head.T
                divergence, entropy, grad = piece_terms(mine @ weight.T, original, labels[part], kl, ce)
                sums += torch.stack((divergence, entropy))
                grad = grad.to(exact)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ weight.to(exact)
                if grad_head is not None:
                    grad_head += (grad.T @ mine.to(exact)).float()
        ctx.save_for_backward(*(g for g in (grad_hidden, grad_head) if g is not None))
        ctx.trained_head = grad_head is not None
        ctx.mark_non_differentiable(sums)
        return kl * sums[0] + ce * sums[1], sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_head = saved[1] * grad if ctx.trained_head else None
        return saved[0] * grad, grad_head, *[None] * 7


def distillation(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    *,
    kl: float,
    ce: float,
    dtype: torch.dtype,
    piece_terms: Terms = terms,
) -> tuple[Tensor, Tensor]:
    """``kl · Σ KL(original ‖ trained) + ce · Σ cross-entropy`` over tokens, in nats.

    Args:
        hidden, teacher_hidden: last hidden states [t, h], normed, of the trained and the original model.
        head, teacher_head: their output embeddings [v, h].
        labels: int64 [t], :data:`IGNORED` where there is none.
        dtype: of the trained model's products; the original's run in its own.
        piece_terms: :func:`terms`, or a compiled form of it.

    Returns:
        the weighted sum, differentiable with respect to ``hidden`` and ``head``; and [Σ KL, Σ CE], float32 [2].
    """
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    arguments: tuple[Any, ...] = (hidden, head, teacher_hidden, teacher_head, labels, kl, ce, dtype, piece_terms)
    return _Distillation.apply(*arguments)
