"""What makes dense layers fast on a GPU without changing their results: TF32 on request, and padding to tile sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Tensor cores take 16-bit matrices whose rows start on 16 bytes; whole tiles of 64 columns serve the vocabulary.
ALIGNMENT = 8
VOCABULARY = 64


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """float32 products on CUDA in TF32 (10 bits of mantissa, several times faster) or in full, while this lasts."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


class PaddedLinear(nn.Module):
    """A linear layer whose sizes are rounded up with zeros; results are those of the layer it was made from.

    Attributes:
        weight: [n_pad, k_pad]. bias: [n_pad] or None. n, k: the true sizes.
    """

    def __init__(self, linear: nn.Linear, multiple: int = ALIGNMENT) -> None:
        super().__init__()
        self.n, self.k = linear.weight.shape
        n, k = (-(-size // multiple) * multiple for size in (self.n, self.k))
        weight = functional.pad(linear.weight.detach(), (0, k - self.k, 0, n - self.n))
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = None if linear.bias is None else functional.pad(linear.bias.detach(), (0, n - self.n))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., k] to [..., n]."""
        if self.k != self.weight.shape[1]:
            x = functional.pad(x, (0, self.weight.shape[1] - self.k))
        y = functional.linear(x, self.weight, self.bias)
        return y[..., : self.n] if self.n != self.weight.shape[0] else y


def pad_dense(model: Any) -> list[str]:
    """Pad a transformers model for a GPU: the vocabulary to 64 entries, other odd linear layers to 8 on both sides.

    The padded logits are zeros at the end, beyond the vocabulary: whoever reads logits cuts them off. Embeddings and
    head stay tied where they were.

    Returns:
        what was padded, for people: "vocabulary 50257 → 50304", "h.0.mlp 2049 × 512".
    """
    padded = []
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.shape[0] % VOCABULARY:
        vocab = head.weight.shape[0]
        extra = -vocab % VOCABULARY
        tied = embedding is not None and embedding.weight is head.weight
        head.weight = nn.Parameter(functional.pad(head.weight.detach(), (0, 0, 0, extra)), requires_grad=False)
        head.out_features = vocab + extra
        if head.bias is not None:
            head.bias = nn.Parameter(functional.pad(head.bias.detach(), (0, extra)), requires_grad=False)
        if tied:
            embedding.weight = head.weight
        padded.append(f"vocabulary {vocab} → {vocab + extra}")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and any(size % ALIGNMENT for size in module.weight.shape):
            model.set_submodule(name, PaddedLinear(module))
            padded.append(f"{name} {module.out_features} × {module.in_features}")
    return padded
