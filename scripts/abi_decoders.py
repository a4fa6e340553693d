"""Random small decoders for scripts/abi_calls.py: attention and Gated DeltaNet, dense layers and mixtures, caches and
inputs of their own, every optional array there or not."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from trirun_kernels.decoder.structs import (
    HEAD_INT8,
    PACKED,
    DecoderStruct,
    DeltaLayerStruct,
    InputsStruct,
    LayerStruct,
    MixtureStruct,
)
from trirun_kernels.decoder.weights import VECTORS

if TYPE_CHECKING:
    from abi_calls import Maker


def decoder(maker: Maker) -> tuple[DecoderStruct, list[Any]]:
    """A decoder, and (structure, field, kind) of all that can be spoilt; kinds are those of fuzz_abi.SPOILT."""
    rng, memory, places = maker.rng, maker.memory, []
    d = DecoderStruct()
    d.layers, d.hidden, d.vocab = rng.choice([1, 2, 3]), rng.choice([16, 48, 144]), rng.choice([3, 64, 100])
    d.slots, d.context = rng.choice([1, 3]), rng.choice([64, 192])
    d.norm_eps, d.embedding_scale, d.residual_scale = 1e-5, rng.choice([1, 3]), rng.choice([1, 0.5])
    d.logit_softcap, d.norm, d.act_bits = rng.choice([0, 30]), rng.randrange(2), rng.choice([8, 16])
    d.kv_dtype, d.embedding_dtype = rng.choice([0, 1]), rng.choice([0, 1, 2, PACKED])
    d.head_dtype = rng.choice([0, 1, 2, HEAD_INT8, PACKED])
    if d.embedding_dtype == PACKED:
        packed = maker.linear(places, d.vocab, d.hidden, bias=False)
        d.embedding = ctypes.addressof(packed)
        d.matrices = (packed, None)
    else:
        d.embedding = memory.halves(d.vocab * d.hidden, d.embedding_dtype)
        d.matrices = (None, None)
    if d.head_dtype == PACKED:
        packed = maker.linear(places, d.vocab, d.hidden, bias=False)
        d.head, d.matrices = ctypes.addressof(packed), (d.matrices[0], packed)
    elif d.head_dtype == HEAD_INT8:
        d.head = memory.words(d.vocab * maker.library.trirun_cpu_head_stride(d.hidden), 1)
        d.head_scales = memory.floats(d.vocab)
        places.append((d, "head_scales", "pointer"))
    else:
        d.head = memory.halves(d.vocab * d.hidden, d.head_dtype)
    layers = (LayerStruct * d.layers)()
    d.layer, d.final_norm = layers, memory.floats(d.hidden)
    if d.norm and rng.random() < 0.5:
        d.final_norm_bias = memory.floats(d.hidden)
    if rng.random() < 0.4:
        _inputs(maker, places, d)
    for index, layer in enumerate(layers):
        before = layers[index - 1] if index else None
        # One that has keys and values of its own.
        _layer(maker, places, d, layer, before if before is not None and before.k.n else None)
    for name in ("layers", "hidden", "vocab", "slots", "context"):
        places.append((d, name, "size"))
    for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_softcap"):
        places.append((d, name, "float"))
    for name in ("norm", "act_bits", "kv_dtype", "embedding_dtype", "head_dtype"):
        places.append((d, name, "enum"))
    places += [(d, "final_norm", "pointer"), (d, "hidden", "padded"), (d, "context", "padded")]
    if d.embedding_dtype in (0, 1, 2):
        places.append((d, "embedding", "pointer"))
    if d.head_dtype in (0, 1, 2):
        places.append((d, "head", "pointer"))
    return d, places


def _inputs(maker: Maker, places: list[Any], d: DecoderStruct) -> None:
    rng, memory, own = maker.rng, maker.memory, InputsStruct()
    own.size, own.table_dtype, own.projection_dtype = (
        rng.choice([16, 80]),
        rng.randrange(3),
        rng.choice([0, 1, 2, PACKED]),
    )
    own.table_scale, own.projection_scale, own.scale = 4.0, 0.25, 0.7
    width = d.layers * own.size
    own.table, own.norm = memory.halves(d.vocab * width, own.table_dtype), memory.floats(own.size)
    if own.projection_dtype == PACKED:
        own.matrix = maker.linear(places, width, d.hidden, bias=False)
        own.projection = ctypes.addressof(own.matrix)
    else:
        own.projection = memory.halves(width * d.hidden, own.projection_dtype)
        places.append((own, "projection", "pointer"))
    places += [(own, "table", "pointer"), (own, "norm", "pointer"), (own, "size", "size"), (own, "size", "padded")]
    places += [(own, name, "enum") for name in ("table_dtype", "projection_dtype")]
    places += [(own, name, "float") for name in ("table_scale", "projection_scale", "scale")]
    d.inputs, d.matrices = ctypes.pointer(own), (*d.matrices, own)


def _layer(maker: Maker, places: list[Any], d: DecoderStruct, layer: LayerStruct, before: LayerStruct | None) -> None:
    rng, memory = maker.rng, maker.memory
    if rng.random() < 0.3:
        attended = _delta(maker, places, d, layer)
    else:
        attended = _attention(maker, places, d, layer, before if rng.random() < 0.5 else None)

    maker.hold(places, layer, "o", d.hidden, attended)
    if d.inputs and rng.random() < 0.7:
        maker.hold(places, layer, "input_gate", d.inputs.contents.size, d.hidden)
        maker.hold(places, layer, "input_out", d.hidden, d.inputs.contents.size)
    layer.activation = rng.choice([0, 1, 2])
    mixture = rng.random() < 0.3
    layer.ffn = 0 if mixture and rng.random() < 0.5 else rng.choice([16, 80, 200])
    if layer.ffn:
        if mixture or rng.random() < 0.7:
            maker.hold(places, layer, "gate", layer.ffn, d.hidden)
        maker.hold(places, layer, "up", layer.ffn, d.hidden)
        maker.hold(places, layer, "down", d.hidden, layer.ffn)
    if mixture:
        _mixture(maker, places, d, layer)
    most = {"mlp_sub_norm": layer.ffn, "attention_sub_norm": attended, "sinks": layer.heads}
    most |= {"v_norm": max(layer.head_dim, 1), "output_scale": 1}
    without = {"q_norm", "k_norm"} | ({"mlp_sub_norm"} if mixture else {"experts_post_norm"})
    without |= set() if mixture and layer.ffn else {"shared_norm", "shared_post_norm"}
    for name in VECTORS:
        if name in without:
            continue
        if rng.random() < 0.5 or (layer.delta and name == "attention_norm"):
            setattr(layer, name, memory.floats(most.get(name, d.hidden)))
            places.append((layer, name, "optional"))
    layer.softcap, layer.parallel = rng.choice([0, 20]), rng.randrange(2)
    for name in ("attention_scale", "softcap"):
        places.append((layer, name, "float"))
    places += [(layer, "parallel", "flag"), (layer, "activation", "enum"), (layer, "ffn", "most")]


def _attention(
    maker: Maker, places: list[Any], d: DecoderStruct, layer: LayerStruct, shared: LayerStruct | None
) -> int:
    """``shared``: a layer whose keys and values it attends to."""
    rng, memory = maker.rng, maker.memory
    layer.kv_heads, layer.head_dim = rng.choice([1, 2]), rng.choice([8, 16, 24, 80])
    if shared is not None:
        layer.kv_heads, layer.head_dim = shared.kv_heads, shared.head_dim
    layer.heads = layer.kv_heads * rng.choice([1, 2, 5])
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    for name, n in (("q", q), ("k", kv), ("v", kv), ("q_gate", q if rng.random() < 0.3 else 0)):
        if n and (shared is None or name not in ("k", "v")):
            maker.hold(places, layer, name, n, d.hidden)
    layer.rotary_half = rng.choice([0, layer.head_dim // 2, layer.head_dim // 4])
    layer.context, layer.window = d.context, rng.choice([0, 0, 7, 100])
    if d.context > 64 and rng.random() < 0.4:
        layer.context, layer.window = 64, rng.choice([1, 32, 60])
    if shared is not None:
        layer.context, layer.window = shared.context, shared.window
    for name in ("cosines", "sines"):
        setattr(layer, name, memory.floats(d.context * (layer.head_dim // 2)))
        places.append((layer, name, "optional" if not layer.rotary_half else "pointer"))
    for name, size in (("q_norm", q), ("k_norm", kv)):
        if rng.random() < 0.5:
            setattr(layer, name, memory.floats(size))
            places.append((layer, name, "optional"))
    layer.interleaved, layer.row_norms, layer.attention_scale = rng.randrange(2), rng.randrange(2), 0.25
    stride = -(-layer.head_dim // 16) * 16
    size = d.slots * layer.kv_heads * layer.context * stride * (2 if d.kv_dtype else 4)
    for name in ("keys", "values"):
        setattr(layer, name, memory.words(size, 16) if shared is None else getattr(shared, name))
        places.append((layer, name, "pointer"))
    for name in ("heads", "kv_heads", "head_dim", "context"):
        places.append((layer, name, "size"))
    places += [(layer, "interleaved", "flag"), (layer, "row_norms", "flag"), (layer, "context", "padded")]
    places += [(layer, "rotary_half", "most"), (layer, "window", "negative")]
    return q


def _delta(maker: Maker, places: list[Any], d: DecoderStruct, layer: LayerStruct) -> int:
    rng, memory = maker.rng, maker.memory
    m = DeltaLayerStruct()
    m.key_heads, m.key_dim, m.value_dim, m.taps = rng.choice([1, 2]), 16, rng.choice([16, 32]), rng.choice([1, 4, 8])
    group = rng.choice([1, 2])
    m.value_heads = m.key_heads * group
    channels, values = 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim, m.value_heads * m.value_dim
    m.key_stride, m.value_stride, m.z_stride = m.key_dim, group * m.value_dim, group * m.value_dim
    m.k_column, m.v_column, m.z_column = m.key_heads * m.key_dim, 2 * m.key_heads * m.key_dim, channels
    apart = rng.random() < 0.5
    for name, n in (("qkv", channels if apart else channels + values), ("z", values if apart else 0)):
        if n:
            maker.hold(places, m, name, n, d.hidden)
    m.gates_dtype = rng.randrange(3)
    m.gates = memory.halves(2 * m.value_heads * d.hidden, m.gates_dtype)
    sizes = {"conv": m.taps * channels, "decay_rate": m.value_heads, "decay_bias": m.value_heads, "norm": m.value_dim}
    sizes |= {"state": d.slots * values * m.key_dim, "ring": d.slots * m.taps * channels}
    for name, size in sizes.items():
        setattr(m, name, memory.floats(size))
        places.append((m, name, "pointer"))
    for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
        places.append((m, name, "size"))
    for name in ("key_stride", "k_column", "v_column", "value_stride", "z_column", "z_stride"):
        places.append((m, name, "most"))
    places += [
        (m, "gates", "pointer"),
        (m, "gates_dtype", "enum"),
        (m, "key_dim", "padded"),
        (m, "value_dim", "padded"),
    ]
    layer.delta = ctypes.pointer(m)
    return values


def _mixture(maker: Maker, places: list[Any], d: DecoderStruct, layer: LayerStruct) -> None:
    rng, memory = maker.rng, maker.memory
    m = MixtureStruct()
    m.experts, m.size = rng.choice([1, 4, 8]), rng.choice([16, 72])
    m.top_k = rng.randint(1, min(m.experts, 3))
    m.groups = rng.choice([1, m.experts // 2]) if m.experts > 1 else 1
    m.top_groups = rng.randint(1, m.groups)
    m.score, m.normalize, m.activation = rng.randrange(2), rng.randrange(2), rng.choice([0, 3])
    m.shared_gate, m.scale, m.limit = int(bool(layer.ffn) and rng.random() < 0.5), 1.0, 7.0
    m.router_dtype, group = rng.randrange(3), rng.choice([-1, 64])
    m.router = memory.halves((m.experts + 1) * d.hidden, m.router_dtype)
    for name, (n, k) in {"gate": (m.size, d.hidden), "up": (m.size, d.hidden), "down": (d.hidden, m.size)}.items():
        lists = [maker.linear([], n, k, group) for _ in range(m.experts)]
        array = (type(lists[0]) * m.experts)(*lists)
        setattr(m, name, array)
        places += [(array[0].weight, "words", "aligned"), (array[0].weight, "n", "padded"), (array[0], "n", "size")]
    for name in ("bias", "correction", "expert_scale"):
        if rng.random() < 0.5:
            setattr(m, name, memory.floats(m.experts))
            places.append((m, name, "optional"))
    for name in ("experts", "top_k", "size", "groups", "top_groups"):
        places.append((m, name, "size"))
    for name in ("router_dtype", "score"):
        places.append((m, name, "enum"))
    places.append((m, "activation", "activation"))
    for name in ("scale", "limit"):
        places.append((m, name, "float"))
    places += [(m, "shared_gate", "switch"), (m, "normalize", "flag"), (m, "router", "pointer")]
    layer.mixture = ctypes.pointer(m)
