"""Where the tensors of a packed checkpoint go in a GGUF file, and in which order of rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from trirun_kernels.decoder.shape import Attention, GatedDelta, LayerShape
from trirun_kernels.weights.names import FINAL_NORM, PREFIX, WEIGHT, layer_prefix

from ...checkpoint.formats.gguf.architecture import LINEARS, NORMS
from ...checkpoint.formats.gguf.mixtures import EXPERT_LAYERS, ROUTER
from ...checkpoint.formats.gguf.targets import Target
from ...models.description import Description
from ...models.parts import TensorNames

# llama.cpp's names of what several linears lie in, and of those of Gated DeltaNet.
_FUSED = {("q", "k", "v"): "attn_qkv", ("gate", "up"): "ffn_up", ("q", "q_gate"): "attn_q"}
_DELTA = {"qkv": "attn_qkv", "z": "attn_gate", "o": "ssm_out"}
_GATES = {"linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha"}
_INPUTS = {
    "table": "per_layer_token_embd.weight", "projection": "per_layer_model_proj.weight",
    "norm": "per_layer_proj_norm.weight",
}  # fmt: skip
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


def places(found: Description, target: Target) -> dict[str, list[Place]]:
    """Where every tensor goes, by the checkpoint's name, but for embedding, head and experts: mostly to one place. Some
    are torn in two, some are not in the file."""
    final = Place("output_norm.weight", value=_plus(found.names.norm_offset))
    every = {FINAL_NORM: [final], _FINAL_BIAS: [Place("output_norm.bias")]}
    for part, name in found.names.inputs.items():
        every[PREFIX + name.removesuffix(WEIGHT) + WEIGHT] = [Place(_INPUTS[part])]
    for index, layer in enumerate(found.shape.layers):
        names, here = found.names.of(layer), f"blk.{index}."
        own = {name: [place] for name, place in _layer_places(layer, names, target).items()}
        if isinstance(layer.mixer, GatedDelta) and layer.mixer.by_head:
            own["linear_attn.in_proj_qkvz.weight"] = _places_by_head(layer.mixer)
        if layer.mixer.shared_with is not None:
            # Published models have keys and values of these layers, too, which nothing reads.
            unread = (found.names.vectors["k_norm"], *(found.names.linears[field] + WEIGHT for field in ("k", "v")))
            every |= {f"{layer_prefix(index)}{name}": [] for name in unread}
        every |= {
            layer_prefix(index) + name: [replace(place, name=here + place.name) for place in parts]
            for name, parts in own.items()
        }
    return every


def _layer_places(layer: LayerShape, names: TensorNames, target: Target) -> dict[str, Place]:
    linears, norms = dict(LINEARS), NORMS | dict(target.norms or {})
    mixer, own = layer.mixer, dict[str, Place]()
    if layer.mixture is not None:
        if "shared_norm" in names.vectors:
            norms["mlp_norm"] = "pre_ffw_norm_2"
        else:
            linears |= {part: f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
        own[names.mixture.router] = Place(f"{ROUTER}{WEIGHT}")
        for scale, known in ((names.mixture.router_scale, ROUTER), (names.mixture.expert_scale, EXPERT_LAYERS["down"])):
            if scale is not None:
                own[scale] = Place(f"{known}.scale")
        if names.mixture.shared_gate:
            gate = names.mixture.shared_gate + WEIGHT
            own[gate] = Place("ffn_gate_inp_shexp.weight", value=lambda x: x.float().flatten())
        if names.mixture.bias:
            own[names.mixture.bias] = Place(f"{ROUTER}.bias")
        if names.mixture.correction:
            own[names.mixture.correction] = Place("exp_probs_b.bias")
    if isinstance(mixer, GatedDelta):
        linears |= _DELTA
        own |= _delta_places(mixer)
    modules = {module: _FUSED[fields] for module, fields in names.fused.items()}
    for field, module in names.linears.items():
        # What keys and values share is the keys'.
        if field in linears:
            modules.setdefault(module, linears[field])
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
    key heads come before the second ones, but for models that have all of a key head together."""
    heads = torch.arange(mixer.value_heads)
    if not mixer.by_head:
        heads = heads.view(mixer.key_heads, -1).t().flatten()
    values = (heads.view(-1, 1) * mixer.value_dim + torch.arange(mixer.value_dim)).flatten()
    channels = torch.cat([torch.arange(2 * mixer.keys), 2 * mixer.keys + values])
    gates = {f"{module}{WEIGHT}": Place(known + WEIGHT, heads) for module, known in _GATES.items()}
    return gates | {
        "linear_attn.in_proj_ba.weight": Place("ssm_ba.weight"),
        "linear_attn.in_proj_qkv.weight": Place("attn_qkv.weight", channels),
        "linear_attn.in_proj_z.weight": Place("attn_gate.weight", values),
        "linear_attn.out_proj.weight": Place("ssm_out.weight", columns=values),
        "linear_attn.conv1d.weight": Place("ssm_conv1d.weight", channels, value=_convolution),
        "linear_attn.A_log": Place("ssm_a", heads, value=lambda x: -x.float().exp()),
        "linear_attn.dt_bias": Place("ssm_dt.bias", heads),
        "linear_attn.norm.weight": Place("ssm_norm.weight"),
    }


def _places_by_head(mixer: GatedDelta) -> list[Place]:
    """Of what holds q, k, v and z of one key head after another."""
    columns, rows = mixer.columns, torch.arange(mixer.channels + mixer.values).view(mixer.key_heads, -1)
    ends = (columns["k_column"], columns["v_column"], columns["z_column"], rows.shape[1])
    q, k, v, z = (part.flatten() for part in rows.tensor_split(ends[:3], 1))
    return [Place("attn_qkv.weight", torch.cat([q, k, v])), Place("attn_gate.weight", z)]


def _convolution(x: Tensor) -> Tensor:
    """[channels, 1, taps] as float32 [channels, taps]."""
    return x.float().flatten(1)


def _plus(offset: float) -> Callable[[Tensor], Tensor] | None:
    return (lambda x: x.float() + offset) if offset else None
