"""References: what every fast path must compute, in a few lines of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights.packing import PackedWeight, dequantize


def int2_gemm(x: Tensor, w: PackedWeight, bias: Tensor | None = None, *, act_bits: int = 16) -> Tensor:
    """``x @ dequantize(w).T + bias`` in float32, rounded to x's dtype. x: [..., k] → [..., n]."""
    inputs = x.float() if act_bits == 16 else int8_round_trip(x.float())
    y = F.linear(inputs, dequantize(w, torch.float32), None if bias is None else bias.float())
    return y.to(x.dtype)


def int8_round_trip(x: Tensor) -> Tensor:
    """x as int8 activations see it: per row, ``round(x · 127/amax)`` (half to even) scaled back.

    The activation rule of BitNet b1.58 (Ma et al. 2024, "The Era of 1-bit LLMs", §2).
    """
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).round().clamp(-128, 127) * scale
