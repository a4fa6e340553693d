"""Random small decoders with mixtures of experts, one of each family's kind."""

from __future__ import annotations

import math

import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder.shape import (
    CLIPPED_SWIGLU,
    Attention,
    DecoderShape,
    FeedForward,
    LayerShape,
    Mixture,
    Routing,
)
from trirun_kernels.decoder.weights import DecoderWeights, LayerWeights, MixtureWeights

from tests.kernels.decoder.models import CONTEXT, VOCAB, random_linear

MIXTURES = {
    "qwen3_moe": Mixture(Routing(16, 4), 96),
    "mixtral": Mixture(Routing(8, 2), 160),
    "olmoe": Mixture(Routing(12, 3, normalize=False), 64),
    "gpt_oss": Mixture(Routing(6, 2), 96, CLIPPED_SWIGLU, limit=1.0),
    "glm4_moe": Mixture(Routing(16, 4, "sigmoid", scale=2.5, groups=4, top_groups=2), 96),
    "qwen3_5_moe": Mixture(Routing(20, 5), 64, shared_gate=True),
}
SHARED = {"glm4_moe": 96, "qwen3_5_moe": 160}


def random_mixture(name, *, hidden=96, heads=4, kv_heads=2, head_dim=32, spec=None, dtype=torch.float16, seed=0):
    """Two layers: the first one dense, as in GLM-4.5, the second one a mixture."""
    generator = torch.Generator().manual_seed(seed)
    spec, mixture, shared, bias = spec or QuantSpec(32, 1.5), MIXTURES[name], SHARED.get(name, 0), name == "gpt_oss"
    mixer = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rotary_half=head_dim // 2)
    layers = LayerShape(mixer, FeedForward(160)), LayerShape(mixer, FeedForward(shared), mixture=mixture)
    shape = DecoderShape(hidden, VOCAB, layers, 1e-5)

    def draw(*size):
        return torch.randn(*size, generator=generator)

    def linears(sizes):
        return {each: random_linear(generator, n, k, spec, bias) for each, (n, k) in sizes.items()}

    def layer(parts):
        own = dict.fromkeys(("gate", "up", "down")) | linears(parts.linear_sizes(hidden))
        norms = {each: torch.rand(hidden, generator=generator) + 0.5 for each in ("attention_norm", "mlp_norm")}
        if parts.mixture is None:
            return LayerWeights(**own, **norms)
        experts = parts.mixture.routing.experts
        each = [linears(mixture.linear_sizes(hidden)) for _ in range(experts)]
        weights = MixtureWeights(
            **{part: [expert[part] for expert in each] for part in ("gate", "up", "down")},
            router=(draw(mixture.outputs, hidden) * 2 / math.sqrt(hidden)).to(dtype),
            bias=draw(experts) if bias else None,
            correction=draw(experts).abs() if mixture.routing.score == "sigmoid" else None,
        )
        return LayerWeights(**own, **norms, mixture=weights)

    embedding = draw(VOCAB, hidden).to(dtype)
    head = (draw(VOCAB, hidden) / math.sqrt(hidden)).to(dtype)
    angles = torch.arange(CONTEXT).unsqueeze(1) * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    final_norm = torch.rand(hidden, generator=generator) + 0.5
    tables = ((angles.cos(), angles.sin()),)
    return DecoderWeights(shape, [layer(parts) for parts in layers], embedding, head, final_norm, tables)
