"""Random small decoders that tests of several files run."""

from __future__ import annotations

import math

import torch
from trirun_kernels import QuantSpec, pack
from trirun_kernels.decoder.weights import DecoderShape, DecoderWeights, LayerWeights, Linear

VOCAB, CONTEXT = 203, 192


def random_linear(generator, n, k, spec, bias):
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, spec.groups(k), generator=generator) + 0.5).mul(1 / math.sqrt(k)).half()
    zeros = (torch.rand(n, spec.groups(k), generator=generator) + 1).half() if spec.zero is None else None
    return Linear(pack(codes, scales, spec, zeros), torch.randn(n, generator=generator) * 0.1 if bias else None)


def random_model(
    *, heads=4, kv_heads=2, head_dim=32, hidden=96, ffn=160, layers=2, half=None, spec=None, bias=False, qk_norm=False,
    sub_norm=False, activation="silu", dtype=torch.float16, seed=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    spec = spec or QuantSpec(32, 1.0)
    half = head_dim // 2 if half is None else half
    shape = DecoderShape(layers, hidden, ffn, heads, kv_heads, head_dim, VOCAB, half, 1e-5, head_dim**-0.5, activation)

    def norm(size, wanted=True):
        return torch.rand(size, generator=generator) + 0.5 if wanted else None

    def layer():
        linears = (random_linear(generator, n, k, spec, bias) for n, k in shape.linear_sizes.values())
        norms = (norm(hidden), norm(hidden), norm(head_dim, qk_norm), norm(head_dim, qk_norm))
        return LayerWeights(*linears, *norms, norm(heads * head_dim, sub_norm), norm(ffn, sub_norm))

    embedding = torch.randn(VOCAB, hidden, generator=generator).to(dtype)
    head = (torch.randn(VOCAB, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
    angles = torch.arange(CONTEXT).unsqueeze(1) * 10000.0 ** -(torch.arange(half) / max(half, 1))
    layers = [layer() for _ in range(layers)]
    return DecoderWeights(shape, layers, embedding, head, norm(hidden), angles.cos(), angles.sin())
