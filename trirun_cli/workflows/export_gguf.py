"""A packed checkpoint as one GGUF file: which tensors go where, and in which order of rows and columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels.decoder.shape import Attention, GatedDelta, LayerShape
from trirun_kernels.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SCALE,
    WEIGHT,
    ZERO,
    embedding_names,
    layer_prefix,
)

from ..checkpoint.formats.gguf.architecture import LINEARS, NORMS
from ..checkpoint.formats.gguf.mixtures import EXPERT_LAYERS, ROUTER
from ..checkpoint.formats.gguf.targets import Target
from ..checkpoint.formats.gguf.types import GgufType
from ..checkpoint.formats.gguf.writer import DENSE, F32, PACKED, GgufTensor, encode
from ..checkpoint.formats.words import exactly, unpacked
from ..checkpoint.reader import Checkpoint
from ..errors import InputError
from ..models.description import Description
from ..models.parts import TensorNames
from ..models.rotary import llama3_frequencies
from .gguf_metadata import attention_of, gguf_model, rotary_of

# An expert's matrix: layer, expert, and which of its three.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)\.weight")
# llama.cpp's names of what several linears lie in, and of those of Gated DeltaNet.
_FUSED = {("q", "k", "v"): "attn_qkv", ("gate", "up"): "ffn_up", ("q", "q_gate"): "attn_q"}
_DELTA = {"qkv": "attn_qkv", "z": "attn_gate", "o": "ssm_out"}
_GATES = {"linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha"}
_FINAL_BIAS = FINAL_NORM.removesuffix(WEIGHT) + ".bias"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes.

    Attributes:
        name: llama.cpp's. rows, columns: which of the tensor's are there, one after another; None: all in their order.
        value: what is made of its floats, or None.
    """

    name: str
    rows: Tensor | None = None
    columns: Tensor | None = None
    value: Callable[[Tensor], Tensor] | None = None


def neighbours(heads: int, head_dim: int, half: int) -> Tensor:
    """Which rows [heads · head_dim] of a query or key projection lie one after another where neighbours are turned
    together, not the halves of what a head turns: ``i`` and ``half + i`` become ``2 i`` and ``2 i + 1``."""
    head = torch.arange(head_dim)
    head[: 2 * half] = head[: 2 * half].view(2, half).t().flatten()
    return (torch.arange(heads).view(-1, 1) * head_dim + head).flatten()


def places(found: Description, target: Target) -> dict[str, Place]:
    """Every tensor's place by the checkpoint's name, but for embedding, head and experts."""
    norm_offset = found.names.norm_offset
    final = Place("output_norm.weight", value=_plus(norm_offset))
    every = {FINAL_NORM: final, _FINAL_BIAS: Place("output_norm.bias")}
    for index, layer in enumerate(found.shape.layers):
        own = _layer_places(layer, found.names.of(layer), target)
        every |= {
            layer_prefix(index) + name: replace(place, name=f"blk.{index}.{place.name}") for name, place in own.items()
        }
    return every


def _layer_places(layer: LayerShape, names: TensorNames, target: Target) -> dict[str, Place]:
    linears, norms = dict(LINEARS), NORMS | dict(target.norms or {})
    mixer, own = layer.mixer, dict[str, Place]()
    if layer.mixture is not None:
        linears |= {part: f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
        own[names.mixture.router] = Place(f"{ROUTER}{WEIGHT}")
        if names.mixture.correction:
            own[names.mixture.correction] = Place("exp_probs_b.bias")
    if isinstance(mixer, GatedDelta):
        linears |= _DELTA
        own |= _delta_places(mixer)
    modules = {module: linears[field] for field, module in names.linears.items() if field in linears}
    modules |= {module: _FUSED[fields] for module, fields in names.fused.items()}
    rows = _turned_rows(mixer, target) if isinstance(mixer, Attention) else {}
    for module, known in modules.items():
        for end in (WEIGHT, ".bias"):
            own.setdefault(module + end, Place(known + end, rows.get(known)))
    for field, tensor in names.vectors.items():
        if tensor is None:
            continue
        known, end = norms[field.removesuffix("_bias")], ".bias" if field.endswith("_bias") else WEIGHT
        # A norm that two parts share is the first one's.
        own.setdefault(tensor, Place(known + end, value=_plus(0.0 if end == ".bias" else names.norm_offset)))
    return own


def _turned_rows(mixer: Attention, target: Target) -> dict[str, Tensor]:
    """The order of rows of queries and keys, where it is another in the file."""
    half = mixer.rotary_half or mixer.head_dim // 2
    if not target.neighbours or mixer.interleaved:
        return {}
    return {
        "attn_q": neighbours(mixer.heads, mixer.head_dim, half),
        "attn_k": neighbours(mixer.kv_heads, mixer.head_dim, half),
    }


def _delta_places(mixer: GatedDelta) -> dict[str, Place]:
    """Of Gated DeltaNet. Value heads of one key head are neighbours in a checkpoint; in the file the first ones of all
    key heads come before the second ones."""
    heads = torch.arange(mixer.value_heads).view(mixer.key_heads, -1).t().flatten()
    values = (heads.view(-1, 1) * mixer.value_dim + torch.arange(mixer.value_dim)).flatten()
    channels = torch.cat([torch.arange(2 * mixer.keys), 2 * mixer.keys + values])
    gates = {f"{module}{WEIGHT}": Place(known + WEIGHT, heads) for module, known in _GATES.items()}
    return gates | {
        "linear_attn.in_proj_qkv.weight": Place("attn_qkv.weight", channels),
        "linear_attn.in_proj_z.weight": Place("attn_gate.weight", values),
        "linear_attn.out_proj.weight": Place("ssm_out.weight", columns=values),
        "linear_attn.conv1d.weight": Place("ssm_conv1d.weight", channels, value=_convolution),
        "linear_attn.A_log": Place("ssm_a", heads, value=lambda x: -x.float().exp()),
        "linear_attn.dt_bias": Place("ssm_dt.bias", heads),
        "linear_attn.norm.weight": Place("ssm_norm.weight"),
    }


def _convolution(x: Tensor) -> Tensor:
    """[channels, 1, taps] as float32 [channels, taps]."""
    return x.float().flatten(1)


def _plus(offset: float) -> Callable[[Tensor], Tensor] | None:
    return (lambda x: x.float() + offset) if offset else None


def gguf_tensors(
    checkpoint: Checkpoint, kind: GgufType, starting: Callable[[str], None], done: Callable[[str, GgufType], None]
) -> Iterator[GgufTensor]:
    """The tensors of the file. A matrix whose rows are no whole blocks, and whatever the checkpoint holds unpacked, is
    stored as floats that hold every value.

    Args:
        checkpoint: the model. kind: of the packed layers; F16 unpacks them.
        starting: called with the name of each packed module before its data is made. done: with name and type after.

    Raises:
        InputError: llama.cpp's model is another, or a tensor has no name in llama.cpp.
    """
    target, found = gguf_model(checkpoint)
    known, modules = places(found, target), set(checkpoint.modules)
    yield from _vocabulary(checkpoint, target, kind, starting, done)
    experts: dict[tuple[int, str], dict[int, str]] = {}
    for name in checkpoint.names:
        module = name.removesuffix(WEIGHT)
        if name in (EMBEDDING, HEAD) or name.endswith((SCALE, ZERO, ".rotary_emb.inv_freq")):
            continue
        if matched := _EXPERT.fullmatch(name):
            experts.setdefault((int(matched[1]), matched[3]), {})[int(matched[2])] = module
            continue
        place = known.get(name)
        if place is None:
            raise InputError(f"{checkpoint.path}: {name} has no name in llama.cpp")
        if module in modules and name.endswith(WEIGHT):
            yield _packed(checkpoint, module, place, kind, starting, done)
        else:
            yield _plain(checkpoint, name, place)
    for (layer, part), members in experts.items():
        missing = next((number for number in range(len(members)) if members.get(number) not in modules), None)
        if missing is not None:
            raise InputError(f"{checkpoint.path}: expert {missing} of layer {layer} has no packed {part}")
        matrices = [
            _packed(checkpoint, members[number], Place(""), kind, starting, done) for number in range(len(members))
        ]
        yield _stacked(f"blk.{layer}.{EXPERT_LAYERS[part]}{WEIGHT}", matrices)
    for name, factors in _rotary_factors(found).items():
        yield GgufTensor(name, (len(factors),), F32, partial(torch.from_numpy, factors))


def _vocabulary(
    checkpoint: Checkpoint,
    target: Target,
    kind: GgufType,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> Iterator[GgufTensor]:
    """The output head and the embedding. Without a head, llama.cpp takes the embedding, but for some architectures."""
    embedding, head = embedding_names(checkpoint.config, checkpoint)
    if target.head == "tied" and head != embedding:
        raise InputError(f"{checkpoint.path}: llama.cpp's {target.architecture} has no output head of its own")
    heads = [] if head == embedding and target.head != "own" else [(head, "output.weight")]
    for name, known in (*heads, (embedding, "token_embd.weight")):
        if (module := name.removesuffix(WEIGHT)) in checkpoint.modules:
            yield _packed(checkpoint, module, Place(known), kind, starting, done)
        else:
            yield _plain(checkpoint, name, Place(known))


def _packed(
    checkpoint: Checkpoint,
    module: str,
    place: Place,
    kind: GgufType,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> GgufTensor:
    n, k = checkpoint.shape(module)
    _check_rows(checkpoint, module + WEIGHT, n, place)
    stored = kind if kind.name in PACKED and k % kind.block == 0 else DENSE[torch.float16]

    def data() -> Tensor:
        starting(module)
        weight = unpacked(checkpoint.packed(module))
        if place.columns is not None:
            weight = _reordered(weight, place.columns, module)
        if stored.name in PACKED:
            rows = encode(weight, stored, module)
        else:
            rows = exactly(weight.dequantize(), (torch.float16,), module)
        done(module, stored)
        return rows if place.rows is None else rows[place.rows]

    return GgufTensor(place.name, (n, k), stored, data)


def _check_rows(checkpoint: Checkpoint, name: str, rows: int, place: Place) -> None:
    """That a tensor has the rows that the file has in another order."""
    if place.rows is not None and rows != len(place.rows):
        raise InputError(f"{checkpoint.path}: {name} has {rows} rows, config.json says {len(place.rows)}")


def _reordered(weight: Quantized, columns: Tensor, name: str) -> Quantized:
    """A weight's columns in another order, whole groups of them.

    Raises:
        InputError: a group's columns do not stay together.
    """
    codes, scales, zeros, size = weight.codes[:, columns], weight.scales, weight.zeros, weight.spec.group_size
    if size != -1:
        groups = columns.view(-1, size) // size if len(columns) % size == 0 else columns.view(1, -1)
        if bool((groups != groups[:, :1]).any()):
            raise InputError(f"{name}: llama.cpp has its columns in an order in which groups of {size} are torn apart")
        scales, zeros = scales[:, groups[:, 0]], None if zeros is None else zeros[:, groups[:, 0]]
    return Quantized(codes, scales, zeros, weight.spec)


def _stacked(known: str, experts: list[GgufTensor]) -> GgufTensor:
    """The same matrix [n, k] of all experts of a layer as one tensor [experts, n, k]."""
    first = experts[0]
    return GgufTensor(
        known, (len(experts), *first.shape), first.kind, lambda: torch.stack([expert.data() for expert in experts])
    )


def _plain(checkpoint: Checkpoint, name: str, place: Place) -> GgufTensor:
    shape = checkpoint[name].shape
    if not shape:
        raise InputError(f"{checkpoint.path}: {name} is a number without a dimension, which llama.cpp has none of")
    _check_rows(checkpoint, name, shape[0], place)

    def data() -> Tensor:
        rows = checkpoint.tensor(name)
        rows = rows if place.value is None else place.value(rows)
        rows = rows if place.rows is None else rows[place.rows]
        # llama.cpp adds and multiplies vectors in float32 alone.
        return rows.float() if rows.dim() == 1 else rows

    made = data()
    if made.dtype not in DENSE:
        raise InputError(f"{checkpoint.path}: {name} is {made.dtype}")
    return GgufTensor(place.name, tuple(made.shape), DENSE[made.dtype], data)


def _rotary_factors(found: Description) -> dict[str, np.ndarray]:
    """What the frequencies of a head are divided by (Llama 3.1, longrope), float32 [rotary_half]."""
    rotary, _ = rotary_of(found)
    half = attention_of(found).rotary_half
    if rotary["rope_type"] == "longrope":
        named = {name: rotary.get(f"{name}_factor") or rotary["short_factor"] for name in ("long", "short")}
        return {f"rope_factors_{name}.weight": np.asarray(values, np.float32) for name, values in named.items()}
    if rotary["rope_type"] != "llama3":
        return {}
    frequencies = rotary["rope_theta"] ** -(np.arange(half) / half)
    return {"rope_freqs.weight": (frequencies / llama3_frequencies(frequencies, rotary)).astype(np.float32)}
