"""Hybrids of attention and Gated DeltaNet: their description, and the weights that only they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from .parts import LLAMA, QK_NORM, Description, MixtureNames, TensorNames, UnsupportedModel, describe, with_experts
from .settings import check_counts, check_numbers, layer_list

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import GatedDelta

_COUNTS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_TAPS = "linear_conv_kernel_dim"
_FEED_FORWARD = {name: LLAMA.linears[name] for name in ("gate", "up", "down")}
# q|k|v and z of all heads, or all of one key head after another; of b and a likewise.
_APART = {"qkv": "linear_attn.in_proj_qkv", "z": "linear_attn.in_proj_z", "o": "linear_attn.out_proj"}
_BY_HEAD = {"qkv": "linear_attn.in_proj_qkvz", "o": "linear_attn.out_proj"}
_GATES, _GATES_BY_HEAD = ("linear_attn.in_proj_b", "linear_attn.in_proj_a"), ("linear_attn.in_proj_ba",)


# Of a mixture whose shared expert's output is multiplied by the sigmoid of a gate.
SHARED_BY_GATE = MixtureNames(
    shared={name: f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    shared_gate="mlp.shared_expert_gate",
)


def gated_delta_hybrid(config: Mapping[str, Any]) -> Description:
    """Qwen3-Next, and the text model of Qwen3.5, with experts or without. ``by_head``: the order of the projection's
    outputs.

    Raises:
        UnsupportedModel, InputError: as :func:`.parts.describe`.
    """
    from trirun_kernels.decoder.shape import GatedDelta

    check_counts(config, (*_COUNTS, _TAPS))
    check_numbers(config, ("full_attention_interval",), int)
    key_heads, value_heads, key_dim, value_dim = (config[name] for name in _COUNTS)
    if value_heads % key_heads or key_dim % 16 or value_dim % 16:
        raise UnsupportedModel(f"{value_heads} heads of {value_dim} values over {key_heads} of {key_dim} keys")
    by_head = bool(config.get("by_head"))
    delta = GatedDelta(key_heads, value_heads, key_dim, value_dim, config[_TAPS], by_head)
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = layer_list(config, "layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    if unknown := sorted(set(kinds) - {"linear_attention", "full_attention"}):
        raise UnsupportedModel(f"layers of the kind {unknown[0]!r}")
    own = TensorNames(
        (_BY_HEAD if by_head else _APART) | _FEED_FORWARD, LLAMA.vectors, norm_offset=1.0,
        gates=dict.fromkeys(_GATES_BY_HEAD, 2 * value_heads) if by_head else dict.fromkeys(_GATES, value_heads),
        mixture=SHARED_BY_GATE,
    )  # fmt: skip
    fused = {"self_attn.q_proj": ("q", "q_gate")}
    names = replace(QK_NORM, fused=fused, norm_offset=1.0, delta=own, mixture=SHARED_BY_GATE)
    mixers = [delta if kind == "linear_attention" else None for kind in kinds]
    found = describe(config, names, mixers=mixers, partial=True, attention={"gated": True})
    return with_shared_expert(found, config) if config.get("num_experts") else found


def with_shared_expert(found: Description, config: Mapping[str, Any]) -> Description:
    """A decoder with the experts of a Qwen model that has a shared one (:data:`SHARED_BY_GATE`).

    Raises:
        UnsupportedModel, InputError: as :func:`.parts.with_experts`.
    """
    size = "shared_expert_intermediate_size"
    check_counts(config, [size])
    layers = sparse_layers(config)
    return with_experts(
        found, config, size="moe_intermediate_size", layers=layers, shared=config[size], shared_gate=True
    )


def sparse_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers of a Qwen model have experts."""
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return [index not in dense and (index + 1) % every == 0 for index in range(config["num_hidden_layers"])]


def gate_rows(names: TensorNames, mixer: GatedDelta, read: Callable[[str], Any]) -> list[Any]:
    """The rows of b, then those of a, of all value heads, from the modules that ``read`` gives as matrices."""
    parts = [read(module) for module in names.gates]
    if not mixer.by_head:
        return parts
    (whole,) = parts
    by_head = whole.reshape(mixer.key_heads, 2, mixer.value_heads // mixer.key_heads, -1)
    return [by_head[:, index].reshape(mixer.value_heads, -1) for index in range(2)]


def delta_vectors(source: SafetensorsDir, prefix: str, mixer: GatedDelta) -> dict[str, np.ndarray]:
    """conv, decay_rate, decay_bias and norm of :class:`~trirun_kernels.decoder.weights.DeltaWeights`; ``prefix``: what
    the names of the layer's tensors begin with.

    Raises:
        UnsupportedModel: one is not there, or the convolution has a bias.
    """
    conv, rate, bias, norm = (f"{prefix}linear_attn.{n}" for n in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"))
    if lost := [name for name in (conv, rate, bias, norm) if name not in source]:
        raise UnsupportedModel(f"there is no tensor {lost[0]}")
    if prefix + "linear_attn.conv1d.bias" in source:
        raise UnsupportedModel("a convolution with a bias")
    taps = source.floats(conv).reshape(mixer.channels, mixer.taps)
    found = {"conv": np.ascontiguousarray(taps.T), "decay_rate": -np.exp(source.floats(rate))}
    return found | {"decay_bias": source.floats(bias), "norm": source.floats(norm)}
