"""References of :mod:`trirun_kernels.decoder.cuda_ops`: plain torch in float32, on any device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_ops import EMBED, GATE, PAGE, POST, RESIDUAL, Cache, Heads
from .reference import activate, rms_norm, rotate, soften, unseen, with_sinks


def rows(
    source: int,
    x: Tensor | None,
    *,
    up: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    post_norm: Tensor | None = None,
    centered: bool = False,
    scale: float = 1.0,
    output_scale: float = 1.0,
    eps: float = 0.0,
    activation: str = "silu",
    tokens: Tensor | None = None,
    slots: Tensor | None = None,
    latest: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """float32 [m, n] before any rounding, and the new residual where the source has one."""
    if source == EMBED:
        assert x is not None and tokens is not None
        ids = tokens.long()
        if latest is not None and slots is not None:
            ids = torch.where(ids < 0, latest.long()[slots.long().clamp(min=0)], ids)
        y = residual = x[ids].float() * scale
    elif source == RESIDUAL:
        assert residual is not None
        y = residual = residual if x is None else (residual + scale * x.float()) * output_scale
    elif source == POST:
        assert residual is not None and x is not None and post_norm is not None
        y = residual = (residual + scale * rms_norm(x.float(), post_norm, eps)) * output_scale
    elif source == GATE:
        assert x is not None
        y = activate(x.float(), activation) * (1.0 if up is None else up.float())
        residual = None
    else:
        assert x is not None
        y, residual = x.float(), None
    if norm is not None:
        y = F.layer_norm(y, norm.shape, norm, norm_bias, eps) if centered else rms_norm(y, norm, eps)
    return y, residual


def prepared_heads(q: Tensor, k: Tensor, heads: Heads, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [m, heads, head_dim] and k [m, kv_heads, head_dim] in float32, normed and rotated."""
    m, at = q.shape[0], positions.long()
    parts = []
    for part, norm in ((q, heads.q_norm), (k, heads.k_norm)):
        wide = part.float().reshape(m, -1, heads.head_dim)
        if norm is not None:
            wide = rms_norm(wide, norm, heads.eps)
        if heads.cosines is not None and heads.sines is not None:
            wide = rotate(wide, heads.cosines[at], heads.sines[at], heads.interleaved)
        parts.append(wide)
    return parts[0], parts[1]


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., head_dim] as the int8 cache holds it: codes [..., head_dim], and one float16 scale [...] each.

    The scale is the largest magnitude / 127 rounded up, so that no code is beyond 127; codes are rounded half to even.
    """
    exact = x.abs().amax(-1) / 127
    scale = exact.half()
    scale = torch.where(scale.float() < exact, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    quotient = x * scale.float().reciprocal().unsqueeze(-1)
    return quotient.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8), scale


def mixed(x: Tensor) -> Tensor:
    """float32 [..., head_dim] times the orthogonal Hadamard matrix, in blocks of the largest power of two that divides
    head_dim: what an int8 cache does to keys, and to the queries that meet them."""
    block = x.shape[-1] & -x.shape[-1]
    y, step = x, 1
    while step < block:
        low, high = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return y * block**-0.5


def int8_round_trip(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What an int8 cache leaves of rotated keys and values float32 [..., head_dim]."""
    turned, values = (codes * scales.float().unsqueeze(-1) for codes, scales in map(quantize_heads, (mixed(k), v)))
    return mixed(turned), values  # the matrix is its own inverse


def append(k: Tensor, v: Tensor, cache: Cache, slots: Tensor, positions: Tensor) -> Cache:
    """A copy of the cache with k and v [m, kv_heads, head_dim] at these slots and positions."""
    keys, values = cache.keys.clone(), cache.values.clone()
    scales = None if cache.scales is None else cache.scales.clone()
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        page, place = cache.block_tables[slot, position // PAGE], position % PAGE
        for index, (part, new) in enumerate(((keys, k[row]), (values, v[row]))):
            if scales is None:
                part[page, :, place] = new.to(part.dtype)
            else:
                new = mixed(new.float()) if part is keys else new.float()
                codes, scales[page, :, place, index] = quantize_heads(new)
                part[page, :, place] = F.pad(codes, (0, part.shape[-1] - codes.shape[-1]))
    return Cache(keys, values, cache.block_tables, scales)


def attend(q: Tensor, heads: Heads, cache: Cache, slots: Tensor, positions: Tensor) -> Tensor:
    """Each row of q [m, heads, head_dim] over positions 0 to its own of its slot: float32 [m, heads·head_dim]."""
    out = torch.zeros(q.shape[0], heads.heads * heads.head_dim, device=q.device)
    group = heads.heads // heads.kv_heads
    q = q.float() if cache.scales is None else mixed(q.float())
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        keys, values = (
            part.float().repeat_interleave(group, 0) for part in gathered(cache, slot, position + 1, heads.head_dim)
        )
        scores = soften(torch.einsum("hd,hkd->hk", q[row], keys) * heads.scale, heads.softcap).unsqueeze(1)
        every = torch.arange(position + 1, device=q.device)
        scores = scores.masked_fill(unseen(every[-1:], every, heads.window), -math.inf)
        weights = with_sinks(scores, heads.sinks).squeeze(1)
        out[row] = torch.einsum("hk,hkd->hd", weights, values).reshape(-1)
    return out


def gathered(cache: Cache, slot: int, length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Positions 0 to ``length`` of a slot, keys and values [kv_heads, length, head_dim]; float32, and keys mixed,
    from an int8 cache."""
    pages = cache.block_tables[slot, : -(-length // PAGE)].long()
    keys, values = (part[pages].transpose(0, 1).flatten(1, 2)[:, :length] for part in (cache.keys, cache.values))
    if cache.scales is None:
        return keys, values
    scales = cache.scales[pages].transpose(0, 1).flatten(1, 2)[:, :length].float()
    keys, values = (part[..., :head_dim] * scales[..., i, None] for i, part in enumerate((keys, values)))
    return keys, values


def adjusted_logits(
    logits: Tensor,
    counts: Tensor | None = None,
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: dict[int, float] | None = None,
) -> Tensor:
    """float32 [vocab] with penalties and bias; counts as in :class:`SamplingState`."""
    out = logits.float().clone()
    if counts is not None:
        generated, seen = (counts & 0x7FFFFFFF).float(), counts != 0
        out = torch.where(seen, torch.where(out > 0, out / repetition, out * repetition), out)
        out -= torch.where(generated > 0, presence + frequency * generated, 0.0)
    for token, value in (bias or {}).items():
        out[token] += value
    return out


def allowed_tokens(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Which tokens may be drawn, bool [vocab]: top-k, then top-p of what that left, and min-p; ties stay together."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.numel():
        allowed &= logits >= logits.topk(top_k).values[-1]
    mass = ((logits - logits.max()) / temperature).exp().double().where(allowed, torch.zeros((), dtype=torch.double))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        reached = mass[order].cumsum(0)
        last = int((reached < top_p * reached[-1]).sum().clamp(max=logits.numel() - 1))
        allowed &= logits >= ordered[last]
    if min_p > 0:
        allowed &= logits >= logits.max() + torch.tensor(min_p).log().item() * temperature
    return allowed


def drawn_token(logits: Tensor, allowed: Tensor, temperature: float, stream: int, drawn: int) -> tuple[int, float]:
    """The token that draw number ``drawn`` of a stream chooses, and how far the number is from choosing a neighbour.

    The inverse of the cumulative distribution over ascending token ids at a number of SplitMix64 (Steele et al. 2014).
    """
    mask = 2**64 - 1
    z = stream + (drawn + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    uniform = ((z ^ (z >> 31)) >> 11) * 2.0**-53
    weights = ((logits.double() - logits.max()) / temperature).exp() * allowed
    reached = weights.cumsum(0) / weights.sum()
    token = int((reached <= uniform).sum().clamp(max=logits.numel() - 1))
    return token, float((reached - uniform).abs().min())
