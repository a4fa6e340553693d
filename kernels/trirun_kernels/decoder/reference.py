"""The reference of the native decoder: the same model in a page of torch, without a cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm import reference
from ..weights.packing import PackedWeight, dequantize
from .delta_reference import DeltaState, delta_layer
from .shape import CLIPPED_SWIGLU, Attention, DecoderShape, FeedForward, GatedDelta, LayerShape, Routing
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
    s, embedding, head = weights.shape, dense_matrix(weights.embedding), dense_matrix(weights.head)
    x = embedding[tokens] * s.embedding_scale
    inputs, kept = _inputs(weights, tokens, x, act_bits), dict[int, tuple[Tensor, Tensor]]()
    for index, (layer, shape) in enumerate(zip(weights.layers, s.layers, strict=True)):
        before = _norm(s, x, layer.attention_norm, layer.attention_norm_bias)
        if isinstance(shape.mixer, GatedDelta):
            y = _delta(weights, layer, shape.mixer, before, act_bits)
        else:
            source = shape.mixer.shared_with
            shared = None if source is None else kept[source]
            y, kept[index] = _attention(weights, layer, shape.mixer, before, act_bits, stored, shared)
        read, x = x, x + _finished(s, y, layer.attention_post_norm)
        if not shape.parallel:
            read, before = x, _norm(s, x, layer.mlp_norm, layer.mlp_norm_bias)
        of_shared = before if layer.shared_norm is None else _norm(s, read, layer.shared_norm, None)
        y = _feed_forward(s, layer, shape, before, of_shared, act_bits)
        x = x + _finished(s, y, layer.mlp_post_norm)
        if layer.input_gate is not None:
            h = gated(
                _linear(layer.input_gate, x, act_bits), inputs[:, index].contiguous(), shape.feed_forward.activation
            )
            x = x + _finished(s, _linear(layer.input_out, h, act_bits), layer.input_norm)
        if layer.output_scale is not None:
            x = x * layer.output_scale
    logits = F.linear(_norm(s, x, weights.final_norm, weights.final_norm_bias), head)
    return soften(logits, s.logit_softcap)


def _inputs(weights: DecoderWeights, tokens: Tensor, x: Tensor, act_bits: int) -> Tensor:
    """Every layer's own input [m, layers, size] of embedded tokens x [m, hidden]; of no size where there are none."""
    own, parts, layers = weights.shape.inputs, weights.inputs, len(weights.layers)
    if own is None or parts is None:
        return x.new_empty(len(x), layers, 0)
    if isinstance(parts.projection, PackedWeight):
        projected = _linear(Linear(parts.projection), x, act_bits)
    else:
        projected = F.linear(x, parts.projection.float())
    projected = projected.view(-1, layers, own.size) * own.projection_scale
    read = parts.table[tokens].float().view(-1, layers, own.size) * own.table_scale
    return (rms_norm(projected, parts.norm, weights.shape.norm_eps) + read) * own.scale


def dense_matrix(matrix: Tensor | PackedWeight | Int8Head) -> Tensor:
    """An embedding or a head of any kind, as float32 [vocab, hidden]."""
    if isinstance(matrix, PackedWeight):
        return dequantize(matrix)
    return matrix.dequantize() if isinstance(matrix, Int8Head) else matrix.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, x float32 [..., n], weight [n] (Zhang & Sennrich
    2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs (i, i + half), or (2i, 2i + 1), of x float32 [m, heads, head_dim] by angles [m, half] (Su et al.
    2021); what comes after 2·half stays as it is."""
    half = cosines.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    c, s = cosines.unsqueeze(1), sines.unsqueeze(1)
    parts = first * c - second * s, second * c + first * s
    return torch.cat((torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), rest), -1)


def activate(x: Tensor, activation: str) -> Tensor:
    """An activation by its name in :data:`~.shape.ACTIVATIONS`."""
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if activation == "silu" else F.relu(x).square()


def soften(x: Tensor, cap: float) -> Tensor:
    """``cap · tanh(x / cap)``; x where cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def unseen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which of the positions ``keys`` [k] each of the positions ``queries`` [q] does not see: bool [q, k]."""
    distance = queries.unsqueeze(-1) - keys
    return (distance < 0) | (distance >= (window or math.inf))


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores [heads, q, k] by a softmax that sinks [heads] take part in."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)
    return torch.cat((scores, beside), -1).softmax(-1)[..., :-1]


def choose(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of every row and their weights.

    Args:
        logits: float32 [m, experts], any bias included. correction: float32 [experts], added to scores for the choice
            alone (Wang et al. 2024, auxiliary-loss-free balancing).

    Returns:
        int64 [m, top_k] in descending order of the choice, and float32 [m, top_k].
    """
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = choice.unflatten(1, (routing.groups, -1))
        sums = grouped.topk(2, -1).values.sum(-1)
        best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if routing.score == "sigmoid" else 0.0))
    return ids, weights * routing.scale


def gated(gate: Tensor, up: Tensor, activation: str, limit: float = 0.0) -> Tensor:
    """``act(gate) · up``; for "clipped_swiglu" (gpt-oss) both within ``limit``, and up + 1 in place of up."""
    if activation == CLIPPED_SWIGLU:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return (F.relu(gate).square() if activation == "relu2" else F.silu(gate)) * up


def sorted_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, and by their number within one: pair numbers [pairs], and every expert's count [experts].

    Args:
        ids: int64 [m, top_k], -1 for a pair without an expert, which comes nowhere.
    """
    flat = ids.flatten()
    order = flat.sort(dim=0, stable=True).indices
    return order[flat[order] >= 0], torch.bincount(flat[flat >= 0], minlength=experts)


def _norm(shape: DecoderShape, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None:
        return x
    if shape.norm == "layer":
        return F.layer_norm(x, weight.shape, weight, bias, shape.norm_eps)
    return rms_norm(x, weight, shape.norm_eps)


def _finished(shape: DecoderShape, y: Tensor, post_norm: Tensor | None) -> Tensor:
    return (y if post_norm is None else rms_norm(y, post_norm, shape.norm_eps)) * shape.residual_scale


def _attention(
    weights: DecoderWeights,
    layer: LayerWeights,
    mixer: Attention,
    x: Tensor,
    act_bits: int,
    stored: Stored | None,
    shared: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What attention adds, and its keys and values; ``shared``: those of another layer that it has in their place."""
    eps, m = weights.shape.norm_eps, x.shape[0]

    def heads(linear: Linear | None, norm: Tensor | None, turned: bool = True) -> Tensor:
        part = _linear(linear, x, act_bits)
        part = part if mixer.row_norms and turned else part.view(m, -1, mixer.head_dim)
        part = (part if norm is None else rms_norm(part, norm, eps)).reshape(m, -1, mixer.head_dim)
        if mixer.rotary is None or not turned:
            return part
        cosines, sines = weights.rotary[mixer.rotary]
        return rotate(part, cosines[:m], sines[:m], mixer.interleaved)

    q = heads(layer.q, layer.q_norm)
    if shared is None:
        k, v = heads(layer.k, layer.k_norm), heads(layer.v, layer.v_norm, turned=False)
        shared = (k, v) if stored is None else stored(k, v)
    k, v = shared
    group = mixer.heads // mixer.kv_heads
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = soften(torch.einsum("qhd,khd->hqk", q, k) * mixer.scale, mixer.softcap)
    positions = torch.arange(m)
    scores = scores.masked_fill(unseen(positions, positions, mixer.window), -math.inf)
    y = torch.einsum("hqk,khd->qhd", with_sinks(scores, layer.sinks), v).reshape(m, -1)
    if layer.q_gate is not None:
        y = y * _linear(layer.q_gate, x, act_bits).sigmoid()
    if layer.attention_sub_norm is not None:
        y = rms_norm(y, layer.attention_sub_norm, eps)
    return _linear(layer.o, y, act_bits), shared


def _delta(weights: DecoderWeights, layer: LayerWeights, mixer: GatedDelta, x: Tensor, act_bits: int) -> Tensor:
    own = layer.delta
    assert own is not None
    row = _linear(own.qkv, x, act_bits)
    if own.z is not None:
        row = torch.cat((row, _linear(own.z, x, act_bits)), 1)
    at, group = mixer.columns, mixer.value_heads // mixer.key_heads

    def heads(first: int, stride: int, size: int) -> Tensor:
        return torch.cat([row[:, first + h * stride :][:, :size] for h in range(mixer.key_heads)], 1)

    q, k = (heads(first, at["key_stride"], mixer.key_dim) for first in (0, at["k_column"]))
    v = heads(at["v_column"], at["value_stride"], group * mixer.value_dim)
    z = heads(at["z_column"], at["z_stride"], group * mixer.value_dim)
    b, a = F.linear(x, own.gates.float()).split(mixer.value_heads, 1)
    kept = DeltaState(
        torch.zeros(mixer.value_heads, mixer.key_dim, mixer.value_dim), torch.zeros(mixer.taps - 1, mixer.channels)
    )
    y = delta_layer(
        torch.cat((q, k, v), 1), z, b, a, conv=own.conv, decay_rate=own.decay_rate, decay_bias=own.decay_bias,
        norm=own.norm, eps=weights.shape.norm_eps, key_heads=mixer.key_heads, kept=kept,
    )  # fmt: skip
    return _linear(layer.o, y, act_bits)


def _feed_forward(
    shape: DecoderShape, layer: LayerWeights, parts: LayerShape, x: Tensor, of_shared: Tensor, act_bits: int
) -> Tensor:
    if layer.mixture is None or parts.mixture is None:
        return _mlp(shape, layer, parts.feed_forward, x, act_bits)
    mixture, weights = parts.mixture, layer.mixture
    logits, experts = x @ weights.router.float().t(), mixture.routing.experts
    ids, scales = choose(
        mixture.routing, logits[:, :experts] + (0.0 if weights.bias is None else weights.bias), weights.correction
    )
    if weights.expert_scale is not None:
        scales = scales * weights.expert_scale[ids]
    y = torch.zeros_like(x)
    for index in ids.unique().tolist():
        rows, ranks = torch.where(ids == index)
        gate, up = (_linear(each[index], x[rows], act_bits) for each in (weights.gate, weights.up))
        h = gated(gate, up, mixture.activation, mixture.limit)
        y.index_add_(0, rows, _linear(weights.down[index], h, act_bits) * scales[rows, ranks, None])
    if layer.experts_post_norm is not None:
        y = rms_norm(y, layer.experts_post_norm, shape.norm_eps)
    if parts.feed_forward.size:
        shared = _mlp(shape, layer, parts.feed_forward, of_shared, act_bits)
        if layer.shared_post_norm is not None:
            shared = rms_norm(shared, layer.shared_post_norm, shape.norm_eps)
        y = y + (shared * logits[:, experts:].sigmoid() if mixture.shared_gate else shared)
    return y


def _mlp(shape: DecoderShape, layer: LayerWeights, feed_forward: FeedForward, x: Tensor, act_bits: int) -> Tensor:
    up = _linear(layer.up, x, act_bits)
    if layer.gate is None:
        y = activate(up, feed_forward.activation)
    else:
        y = activate(_linear(layer.gate, x, act_bits), feed_forward.activation) * up
    if layer.mlp_sub_norm is not None:
        y = rms_norm(y, layer.mlp_sub_norm, shape.norm_eps)
    return _linear(layer.down, y, act_bits)


def _linear(linear: Linear | None, x: Tensor, act_bits: int) -> Tensor:
    if linear is None or not isinstance(linear.weight, PackedWeight):
        raise TypeError("the reference computes with torch tensors: weights must be PackedWeight")
    return reference.int2_gemm(x, linear.weight, linear.bias, act_bits=act_bits)
