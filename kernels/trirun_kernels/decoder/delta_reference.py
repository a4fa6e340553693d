"""The reference of Gated DeltaNet layers: plain torch in float32, token by token.

Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", eq. 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

UNIT_EPS = 1e-6  # of the length of q and k


@dataclass(slots=True)
class DeltaState:
    """What a layer keeps of a sequence, written in place.

    Attributes:
        state: float32 [value_heads, key_dim, value_dim]. inputs: [taps − 1, channels], the convolution's last ones.
    """

    state: Tensor
    inputs: Tensor


def convolve(x: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution: x [m, channels] after ``inputs`` [taps − 1, channels], weight [taps, channels],
    the newest token's last → [m, channels]."""
    m, taps = x.shape[0], weight.shape[0]
    whole = torch.cat((inputs, x))
    return F.silu(torch.stack([whole[t : t + m] * weight[t] for t in range(taps)]).sum(0))


def log_decay(a: Tensor, decay_rate: Tensor, decay_bias: Tensor) -> Tensor:
    """The logarithm of what the state is multiplied by, a [m, value_heads], decay_rate = −e^A."""
    return decay_rate * F.softplus(a + decay_bias)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The recurrence: ``S = e^g S; d = beta (v − kᵀS); S += k dᵀ; o = qᵀS``.

    Args:
        q, k: float32 [m, key_heads, key_dim], made of unit length here. v: [m, value_heads, value_dim]; value heads
            share keys as neighbours do. g, beta: [m, value_heads].
        state: float32 [value_heads, key_dim, value_dim], written.

    Returns:
        float32 [m, value_heads, value_dim].
    """
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(part).repeat_interleave(group, 1) for part in (q, k))
    q = q * q.shape[-1] ** -0.5
    out = []
    for i in range(v.shape[0]):
        state *= g[i].exp()[:, None, None]
        change = beta[i, :, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], state))
        state += k[i].unsqueeze(2) * change.unsqueeze(1)
        out.append(torch.einsum("hk,hkv->hv", q[i], state))
    return torch.stack(out)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(o) · silu(z)`` over the last dimension."""
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight * F.silu(z)


def delta_layer(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv: Tensor,
    decay_rate: Tensor,
    decay_bias: Tensor,
    norm: Tensor,
    eps: float,
    key_heads: int,
    kept: DeltaState,
) -> Tensor:
    """All between a layer's input projections and its output projection, of consecutive tokens of one sequence.

    Args:
        qkv: float32 [m, channels]. z: [m, value_heads·value_dim]. b, a: [m, value_heads].
        conv: [taps, channels]. norm: [value_dim]. kept: written.

    Returns:
        float32 [m, value_heads·value_dim].
    """
    value_heads, key_dim, value_dim = kept.state.shape
    m, keys = qkv.shape[0], key_heads * key_dim
    mixed = convolve(qkv, kept.inputs, conv)
    kept.inputs = torch.cat((kept.inputs, qkv))[m:]
    q, k, v = mixed.split((keys, keys, value_heads * value_dim), 1)
    o = delta_rule(
        q.reshape(m, key_heads, key_dim), k.reshape(m, key_heads, key_dim), v.reshape(m, value_heads, value_dim),
        log_decay(a, decay_rate, decay_bias), b.sigmoid(), kept.state,
    )  # fmt: skip
    return gated_norm(o, z.view(m, value_heads, value_dim), norm, eps).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
