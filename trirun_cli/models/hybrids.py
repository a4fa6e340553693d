"""Hybrids of attention and Gated DeltaNet: their description, and the weights that only they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from .experts import GATED_SHARED, layers_with_experts, with_shared_expert
from .parts import LLAMA, QK_NORM, Description, TensorNames, UnsupportedModel, describe
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


def gated_delta_hybrid(config: Mapping[str, Any]) -> Description:
    """Qwen3-Next, and the text model of Qwen3.5. ``by_head``: the order of the projection's outputs.

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
        (_BY_HEAD if by_head else _APART) | _FEED_FORWARD, LLAMA.vectors, norm_offset=1.0, mixture=GATED_SHARED,
        gates=dict.fromkeys(_GATES_BY_HEAD, 2 * value_heads) if by_head else dict.fromkeys(_GATES, value_heads),
    )  # fmt: skip
    names = replace(
        QK_NORM, fused={"self_attn.q_proj": ("q", "q_gate")}, norm_offset=1.0, delta=own, mixture=GATED_SHARED
    )
    mixers = [delta if kind == "linear_attention" else None for kind in kinds]
    found = describe(config, names, mixers=mixers, partial=True, attention={"gated": True})
    if not any(layers_with_experts(config)):
        return found
    return with_shared_expert(found, config)


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


_QWEN3_5: dict[str, Any] = {
    "partial_rotary_factor": 0.25, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# As :data:`.families.FAMILIES`.
HYBRIDS: dict[str, tuple[Callable[[Mapping[str, Any]], Description], dict[str, Any]]] = {
    "qwen3_next": (
        gated_delta_hybrid,
        {
            "partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 2, "by_head": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        },
    ),
    "qwen3_5_text": (gated_delta_hybrid, {"num_key_value_heads": 4} | _QWEN3_5),
    "qwen3_5_moe_text": (
        gated_delta_hybrid,
        {
            # Its experts have the place of the feed-forward part whose size this is.
            "num_key_value_heads": 2, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        } | _QWEN3_5,
    ),
}  # fmt: skip
