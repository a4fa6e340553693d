"""The reference of the native decoder: the same model in a page of torch, without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm import reference
from ..weights.packing import PackedWeight
from .weights import DecoderWeights, Int8Head, LayerWeights, Linear

Stored = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forward(weights: DecoderWeights, tokens: Tensor, *, act_bits: int = 16, stored: Stored | None = None) -> Tensor:
    """Logits after every token of one sequence, in float32 throughout.

    Args:
        weights: the model. tokens: int64 [m], from position 0 on.
        act_bits: 16 computes linears in float32, 8 on int8 activations (see :func:`reference.int8_round_trip`).
        stored: what a cache leaves of keys and values [m, kv_heads, head_dim]; None leaves them as they are.

    Returns:
        float32 [m, vocab].

    Raises:
        TypeError: a linear is not a :class:`PackedWeight` of torch tensors.
    """
    x = weights.embedding[tokens].float()
    for layer in weights.layers:
        x = x + _attention(weights, layer, rms_norm(x, layer.attention_norm, weights.shape.norm_eps), act_bits, stored)
        x = x + _mlp(weights, layer, rms_norm(x, layer.mlp_norm, weights.shape.norm_eps), act_bits)
    head = weights.head.dequantize() if isinstance(weights.head, Int8Head) else weights.head.float()
    return F.linear(rms_norm(x, weights.final_norm, weights.shape.norm_eps), head)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, x float32 [..., n], weight [n] (Zhang & Sennrich
    2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of x float32 [m, heads, head_dim] by angles [m, half] (Su et al. 2021); what comes
    after 2·half stays as it is."""
    half = cosines.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def _attention(weights: DecoderWeights, layer: LayerWeights, x: Tensor, act_bits: int, stored: Stored | None) -> Tensor:
    shape, m = weights.shape, x.shape[0]
    q, k, v = (_linear(linear, x, act_bits).view(m, -1, shape.head_dim) for linear in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, shape.norm_eps)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, shape.norm_eps)
    q, k = (rotate(part, weights.cosines[:m], weights.sines[:m]) for part in (q, k))
    if stored is not None:
        k, v = stored(k, v)
    group = shape.heads // shape.kv_heads
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.attention_scale
    scores = scores.masked_fill(torch.ones(m, m, dtype=torch.bool).triu(1), -math.inf)
    y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(m, -1)
    if layer.attention_sub_norm is not None:
        y = rms_norm(y, layer.attention_sub_norm, shape.norm_eps)
    return _linear(layer.o, y, act_bits)


def _mlp(weights: DecoderWeights, layer: LayerWeights, x: Tensor, act_bits: int) -> Tensor:
    gate, up = _linear(layer.gate, x, act_bits), _linear(layer.up, x, act_bits)
    y = (F.silu(gate) if weights.shape.activation == "silu" else F.relu(gate).square()) * up
    if layer.mlp_sub_norm is not None:
        y = rms_norm(y, layer.mlp_sub_norm, weights.shape.norm_eps)
    return _linear(layer.down, y, act_bits)


def _linear(linear: Linear, x: Tensor, act_bits: int) -> Tensor:
    if not isinstance(linear.weight, PackedWeight):
        raise TypeError("the reference computes with torch tensors: weights must be PackedWeight")
    return reference.int2_gemm(x, linear.weight, linear.bias, act_bits=act_bits)
