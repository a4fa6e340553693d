"""Slow twins of :mod:`trirun_kernels.cuda_decoder_ops`: plain torch in float32, on any device, returning new tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_decoder_ops import EMBED, GATE, PAGE, RESIDUAL, Cache, Heads
from .decoder_reference import rms_norm, rotate


def rows(
    source: int,
    x: Tensor | None,
    *,
    up: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "silu",
    tokens: Tensor | None = None,
    slots: Tensor | None = None,
    latest: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """float32 [m, n] before any rounding, and the new residual where the source has one."""
    if source == EMBED:
        ids = tokens.long()
        if latest is not None:
            ids = torch.where(ids < 0, latest.long()[slots.long().clamp(min=0)], ids)
        y = residual = x[ids].float()
    elif source == RESIDUAL:
        y = residual = residual if x is None else residual + x.float()
    elif source == GATE:
        gate = x.float()
        y = (F.silu(gate) if activation == "silu" else F.relu(gate).square()) * up.float()
        residual = None
    else:
        y, residual = x.float(), None
    return (y if norm is None else rms_norm(y, norm, eps)), residual


def prepared_heads(q: Tensor, k: Tensor, heads: Heads, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [m, heads, head_dim] and k [m, kv_heads, head_dim] in float32, normed and rotated."""
    m, at = q.shape[0], positions.long()
    parts = []
    for part, norm in ((q, heads.q_norm), (k, heads.k_norm)):
        wide = part.float().reshape(m, -1, heads.head_dim)
        if norm is not None:
            wide = rms_norm(wide, norm, heads.eps)
        parts.append(rotate(wide, heads.cosines[at], heads.sines[at]))
    return parts[0], parts[1]


def append(k: Tensor, v: Tensor, cache: Cache, slots: Tensor, positions: Tensor) -> Cache:
    """A copy of the cache with k and v [m, kv_heads, head_dim] at these slots and positions."""
    keys, values = cache.keys.clone(), cache.values.clone()
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot >= 0:
            page = cache.block_tables[slot, position // PAGE]
            keys[page, :, position % PAGE], values[page, :, position % PAGE] = k[row].to(keys.dtype), v[row].to(keys.dtype)
    return Cache(keys, values, cache.block_tables)


def attend(q: Tensor, heads: Heads, cache: Cache, slots: Tensor, positions: Tensor) -> Tensor:
    """Each row of q [m, heads, head_dim] over positions 0 to its own of its slot: float32 [m, heads·head_dim]."""
    out = torch.zeros(q.shape[0], heads.heads * heads.head_dim, device=q.device)
    group = heads.heads // heads.kv_heads
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        keys, values = (gathered(part, cache.block_tables[slot], position + 1).float() for part in (cache.keys, cache.values))
        keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
        scores = torch.einsum("hd,hkd->hk", q[row].float(), keys) * heads.scale
        out[row] = torch.einsum("hk,hkd->hd", scores.softmax(-1), values).reshape(-1)
    return out


def gathered(part: Tensor, table: Tensor, length: int) -> Tensor:
    """Positions 0 to ``length`` of a slot, [kv_heads, length, head_dim], from keys or values and the slot's pages."""
    pages = part[table[: -(-length // PAGE)].long()]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


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


def gumbel_noise(seed: int, drawn: int, vocab: int) -> Tensor:
    """float32 [vocab] of Gumbel noise from Philox4x32-10 (Salmon et al. 2011), counter (token / 4, drawn)."""
    mask = 0xFFFFFFFF
    index = torch.arange(-(-vocab // 4), dtype=torch.int64)
    c = [index, torch.full_like(index, drawn & mask), torch.zeros_like(index), torch.zeros_like(index)]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c[0])
        high1, low1 = _multiply(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    words = torch.stack(c, 1).flatten()[:vocab]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product of 32-bit numbers, without overflowing int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF
