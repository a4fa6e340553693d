"""What descriptions of mixtures of experts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .parts import Description, MixtureNames, UnsupportedModel
from .settings import check_counts

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import LayerShape

# Far more than any model has: what is made for each of them would fill the memory.
MOST_EXPERTS = 4096
# One expert that every row goes to, by a gate (Qwen2-MoE and what came of it).
GATED_SHARED = MixtureNames(
    shared={name: f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    shared_gate="mlp.shared_expert_gate",
)


def with_experts(
    found: Description,
    config: Mapping[str, Any],
    *,
    experts: str = "num_experts",
    size: str = "intermediate_size",
    layers: Sequence[bool] | None = None,
    shared: int = 0,
    score: str = "softmax",
    normalize: bool | None = None,
    **fields: Any,
) -> Description:
    """A decoder with a mixture of experts in place of feed-forward parts.

    Args:
        experts, size: names of the settings of how many there are, and of the features of one.
        layers: which have experts; None: all. shared: features of the expert that every row goes to, 0 for none.
        score, normalize: of :class:`~trirun_kernels.decoder.shape.Routing`; None: as config.json says.
        fields: others of :class:`~trirun_kernels.decoder.shape.Mixture`.

    Raises:
        UnsupportedModel: numbers that the kernels do not have. InputError: a size is missing or is none.
    """
    from trirun_kernels.decoder.shape import FeedForward, Mixture, Routing

    # What transformers calls the number of experts of every family since its version 5.
    experts = "num_local_experts" if config.get("num_local_experts") else experts
    have = layers or [True] * len(found.shape.layers)
    check_counts(config, [experts, "num_experts_per_tok"] + [size] * any(have))
    if config[experts] > MOST_EXPERTS:
        raise InputError(f"config.json: {experts} is {config[experts]}, above {MOST_EXPERTS}")
    try:
        routing = Routing(
            config[experts], config["num_experts_per_tok"], score,
            bool(config.get("norm_topk_prob")) if normalize is None else normalize,
            float(config.get("routed_scaling_factor") or 1.0), config.get("n_group") or 1,
            config.get("topk_group") or 1,
        )  # fmt: skip
    except ValueError as error:
        raise UnsupportedModel(str(error)) from None

    def layer(parts: LayerShape) -> LayerShape:
        act = parts.feed_forward.activation
        gated = found.names.mixture.shared_gate is not None
        mixture = replace(Mixture(routing, config[size], act, shared_gate=gated), **fields)
        return replace(parts, feed_forward=FeedForward(shared, act), mixture=mixture)

    whole = tuple(layer(parts) if each else parts for parts, each in zip(found.shape.layers, have, strict=True))
    return replace(found, shape=replace(found.shape, layers=whole))


def with_shared_expert(found: Description, config: Mapping[str, Any]) -> Description:
    """A decoder with the experts of a Qwen that has a shared one, of :data:`GATED_SHARED`; see :func:`with_experts`."""
    size = "shared_expert_intermediate_size"
    check_counts(config, [size])
    layers = layers_with_experts(config)
    return with_experts(found, config, size="moe_intermediate_size", layers=layers, shared=config[size])


def layers_with_experts(config: Mapping[str, Any]) -> list[bool]:
    """Which layers of a Qwen have experts."""
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(config["num_hidden_layers"])
    return [bool(config.get("num_experts")) and index not in dense and (index + 1) % every == 0 for index in layers]
