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
from trirun_kernels.decoder.weights import DecoderWeights, LayerWeights, MixtureWeights, vector_lengths

from tests.kernels.decoder.models import CONTEXT, VOCAB, random_linear

MIXTURES = {
    "qwen3_moe": Mixture(Routing(16, 4), 96),
    "mixtral": Mixture(Routing(8, 2), 160),
    "olmoe": Mixture(Routing(12, 3, normalize=False), 64),
    "gpt_oss": Mixture(Routing(6, 2), 96, CLIPPED_SWIGLU, limit=1.0),
    "glm4_moe": Mixture(Routing(16, 4, "sigmoid", scale=2.5, groups=4, top_groups=2), 96),
    "qwen3_5_moe": Mixture(Routing(20, 5), 64, shared_gate=True),
    "gemma4": Mixture(Routing(8, 3), 96, "gelu_tanh"),
    "gemma4, gated": Mixture(Routing(8, 3), 96, shared_gate=True),
    "experts with a norm": Mixture(Routing(8, 2), 64),
}
SHARED = {"glm4_moe": 96, "qwen3_5_moe": 160, "gemma4": 160, "gemma4, gated": 224}
# Vectors of the mixture's layer beside the usual ones; factors of the experts' weights come with them.
OWN = {
    "gemma4": ("shared_norm", "shared_post_norm", "experts_post_norm", "mlp_post_norm", "output_scale"),
    "gemma4, gated": ("shared_norm", "shared_post_norm"),
    "experts with a norm": ("experts_post_norm",),
}


def random_mixture(name, *, hidden=96, heads=4, kv_heads=2, head_dim=32, spec=None, dtype=torch.float16, seed=0):
    """Two layers: the first one dense, as in GLM-4.5, the second one a mixture."""
    generator = torch.Generator().manual_seed(seed)
    spec, mixture, shared, bias = spec or QuantSpec(32, 1.5), MIXTURES[name], SHARED.get(name, 0), name == "gpt_oss"
    mixer = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rotary_half=head_dim // 2)
    feed_forward = FeedForward(shared, mixture.activation if shared else "silu")
    layers = LayerShape(mixer, FeedForward(160)), LayerShape(mixer, feed_forward, mixture=mixture)
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
        experts, lengths = parts.mixture.routing.experts, vector_lengths(parts, hidden)
        norms |= {each: torch.rand(lengths[each], generator=generator) + 0.5 for each in OWN.get(name, ())}
        each = [linears(mixture.linear_sizes(hidden)) for _ in range(experts)]
        weights = MixtureWeights(
            **{part: [expert[part] for expert in each] for part in ("gate", "up", "down")},
            router=(draw(mixture.outputs, hidden) * 2 / math.sqrt(hidden)).to(dtype),
            bias=draw(experts) if bias else None,
            correction=draw(experts).abs() if mixture.routing.score == "sigmoid" else None,
            expert_scale=torch.rand(experts, generator=generator) + 0.5 if name in OWN else None,
        )
        return LayerWeights(**own, **norms, mixture=weights)

    embedding = draw(VOCAB, hidden).to(dtype)
    head = (draw(VOCAB, hidden) / math.sqrt(hidden)).to(dtype)
    angles = torch.arange(CONTEXT).unsqueeze(1) * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    final_norm = torch.rand(hidden, generator=generator) + 0.5
    tables = ((angles.cos(), angles.sin()),)
    return DecoderWeights(shape, [layer(parts) for parts in layers], embedding, head, final_norm, tables)
