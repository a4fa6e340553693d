"""Random small decoders that tests of several files run."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from trirun_kernels import QuantSpec, pack
from trirun_kernels.decoder.shape import DecoderShape, LayerInputs
from trirun_kernels.decoder.weights import (
    VECTORS,
    DecoderWeights,
    InputWeights,
    LayerWeights,
    Linear,
    vector_lengths,
)

VOCAB, CONTEXT = 203, 192

# What families add to Llama's parts, for tests of both decoders.
PARTS = {
    "windows": {"mixer": [{"window": 30}, {}], "layers": 3},
    "a window of one": {"mixer": {"window": 1}, "seed": 4},
    "softened scores and logits, GELU": {
        "mixer": {"softcap": 2.0}, "whole": {"logit_softcap": 3.0}, "activation": "gelu_tanh",
    },
    "sinks and windows": {"mixer": [{"sinks": True, "window": 20}, {"sinks": True}]},
    "neighbours rotate, some layers do not": {
        "mixer": [{"interleaved": True}, {"rotary": None, "rotary_half": 0}], "half": 12,
    },
    "post norms, norms of whole rows, factors": {
        "post_norms": True, "qk_norm": True, "mixer": {"row_norms": True},
        "whole": {"residual_scale": 0.5, "embedding_scale": 3.0},
    },
    "heads of two sizes, norms of values, scaled layers": {
        "mixer": [{}, {"head_dim": 48, "kv_heads": 1}], "qk_norm": True, "gemma4": True, "post_norms": True,
        "layers": 3,
    },
    "scaled layers": {"gemma4": True, "seed": 2},
    "layer norms, parallel parts": {"whole": {"norm": "layer"}, "parallel": True},
    "layer norms with biases, no gate": {"whole": {"norm": "layer"}, "norm_bias": True, "gated": False},
    "shared caches, windows": {
        "mixer": [{"window": 30}, {}, {"window": 30, "shared_with": 0}, {"shared_with": 1, "heads": 6}], "layers": 4,
        "qk_norm": True, "gemma4": True,
    },
    "a shared cache, a head a thread": {"mixer": [{}, {"shared_with": 0}], "head_dim": 64, "layers": 2},
    "shared caches, norms of whole rows, gates": {
        "mixer": [{"row_norms": True}, {"row_norms": True, "shared_with": 0, "gated": True}], "qk_norm": True,
    },
    "inputs of layers": {
        "inputs": {"size": 48}, "activation": "gelu_tanh", "post_norms": True, "gemma4": True, "seed": 3,
    },
    "packed inputs of layers": {
        "inputs": {"size": 208, "spec": QuantSpec(32, 1.0)}, "layers": 3, "mixer": [{"window": 30}, {}],
        "dtype": torch.bfloat16, "seed": 1,
    },
}  # fmt: skip


def random_linear(generator, n, k, spec, bias):
    codes = torch.randint(0, 4, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, spec.groups(k), generator=generator) + 0.5).mul(1 / math.sqrt(k)).half()
    zeros = (torch.rand(n, spec.groups(k), generator=generator) + 1).half() if spec.zero is None else None
    return Linear(pack(codes, scales, spec, zeros), torch.randn(n, generator=generator) * 0.1 if bias else None)


def random_model(
    *, heads=4, kv_heads=2, head_dim=32, hidden=96, ffn=160, layers=2, half=None, spec=None, bias=False, qk_norm=False,
    sub_norm=False, activation="silu", dtype=torch.float16, seed=0, vocabulary=None, tied=False,
    mixer=None, whole=None, gated=True, parallel=False, post_norms=False, norm_bias=False, gemma4=False, inputs=None,
):  # fmt: skip
    """``mixer``: fields of Attention, a list of them for the layers in turn. ``whole``: fields of DecoderShape.
    ``gemma4``: norms of values, and a scale of every layer's output. ``inputs``: arguments of :func:`with_inputs`."""
    generator = torch.Generator().manual_seed(seed)
    spec = spec or QuantSpec(32, 1.0)
    half = head_dim // 2 if half is None else half
    shape = DecoderShape.uniform(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=VOCAB,
        rotary_half=half, activation=activation,
    )  # fmt: skip
    mixers = mixer if isinstance(mixer, list) else [mixer or {}]

    def described(index, layer):
        own = replace(layer.mixer, **mixers[index % len(mixers)])
        return replace(layer, mixer=own, feed_forward=replace(layer.feed_forward, gated=gated), parallel=parallel)

    described_layers = tuple(described(index, layer) for index, layer in enumerate(shape.layers))
    shape = replace(shape, layers=described_layers, **(whole or {}))

    def norm(size, wanted=True):
        return torch.rand(size, generator=generator) + 0.5 if wanted else None

    def layer(each):
        sizes, lengths = each.linear_sizes(hidden), vector_lengths(each, hidden)
        parts = {name: random_linear(generator, n, k, spec, bias) for name, (n, k) in sizes.items()}
        wanted = {"attention_norm", "mlp_norm"}
        if parallel:
            parts["mlp_norm"] = parts["attention_norm"] = norm(hidden)
            wanted = set()
        wanted |= {"q_norm", "k_norm"} if qk_norm else set()
        wanted |= {"attention_sub_norm", "mlp_sub_norm"} if sub_norm else set()
        wanted |= {"attention_post_norm", "mlp_post_norm"} if post_norms else set()
        wanted |= {"attention_norm_bias", "mlp_norm_bias"} if norm_bias else set()
        wanted |= {"v_norm", "output_scale"} if gemma4 else set()
        wanted |= {"sinks"} if each.mixer.sinks else set()
        wanted -= set() if each.mixer.shared_with is None else {"k_norm", "v_norm"}
        vectors = {name: norm(lengths[name]) for name in VECTORS if name in wanted}
        return LayerWeights(**dict.fromkeys(("k", "v", "gate")) | parts | vectors)

    # vocabulary: the grid of a packed embedding and head, which `tied` makes one.
    embedding = torch.randn(VOCAB, hidden, generator=generator).to(dtype)
    head = (torch.randn(VOCAB, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
    if vocabulary is not None:
        embedding, head = (random_linear(generator, VOCAB, hidden, vocabulary, False).weight for _ in range(2))
    if tied:
        head = embedding
    angles = torch.arange(CONTEXT).unsqueeze(1) * 10000.0 ** -(torch.arange(half) / max(half, 1))
    layers = [layer(each) for each in shape.layers]
    weights = DecoderWeights(shape, layers, embedding, head, norm(hidden), [(angles.cos(), angles.sin())])
    return weights if inputs is None else with_inputs(weights, dtype=dtype, **inputs)


def with_inputs(weights, size, spec=None, dtype=torch.float16, seed=9):
    """The same decoder with an input of every layer's own. ``spec``: the grid of a packed projection."""
    generator, s = torch.Generator().manual_seed(seed), weights.shape
    own, width = LayerInputs(size, VOCAB + 5, 0.7, s.hidden**-0.5, 0.8), len(s.layers) * size
    shape = replace(s, inputs=own, layers=tuple(replace(each, own_input=size) for each in s.layers))
    if spec is None:
        projection = torch.randn(width, s.hidden, generator=generator).to(dtype)
    else:
        projection = random_linear(generator, width, s.hidden, spec, False).weight
    table = torch.randn(own.vocab, width, generator=generator).to(dtype)
    inputs = InputWeights(table, projection, torch.rand(size, generator=generator) + 0.5)

    def layer(each, norm):
        gate = random_linear(generator, size, s.hidden, QuantSpec(32, 1.0), False)
        gate.weight.scales.div_(16)  # the residual stream is multiplied by it as it is, and float16 has to hold that
        out = random_linear(generator, s.hidden, size, QuantSpec(-1, 1.0), False)
        norm = torch.rand(s.hidden, generator=generator) + 0.5 if norm else None
        return replace(each, input_gate=gate, input_out=out, input_norm=norm)

    # With a norm behind the part and without.
    layers = [layer(each, index % 2 == 0) for index, each in enumerate(weights.layers)]
    return replace(weights, shape=shape, layers=layers, inputs=inputs)
