"""Mixtures of experts in GGUF: one tensor [experts, n, k] for the same layer of all experts. In trirun it is one matrix
[n, k] an expert, by the names of :mod:`trirun_kernels.weights.experts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trirun_kernels.weights.names import WEIGHT, layer_prefix

from ....errors import InputError
from .metadata import Metadata

# An expert's layers, and llama.cpp's names of the tensors that hold those of all experts.
EXPERT_LAYERS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
ROUTER = "ffn_gate_inp"
# llama.cpp's number of a router that takes the softmax of all experts.
_SOFTMAX = 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """How a family's experts are named and chosen.

    Attributes:
        router: transformers' stored name of it within a layer. count, width: keys of config.json for the number of
            experts, and for the rows of an expert's gate. normalized: the chosen experts' weights are made to sum to 1.
        constants: what config.json says of every model of the family.
    """

    router: str
    count: str
    width: str
    normalized: bool
    constants: tuple[tuple[str, Any], ...] = ()


QWEN3_MOE = Mixture(
    "mlp.gate",
    "num_experts",
    "moe_intermediate_size",
    True,
    (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])),
)
OLMOE = Mixture("mlp.gate", "num_experts", "intermediate_size", False, (("norm_topk_prob", False),))
MIXTRAL = Mixture("block_sparse_moe.gate", "num_local_experts", "intermediate_size", True)


def mixture_config(metadata: Metadata, mixture: Mixture) -> dict[str, Any]:
    """What config.json says of the experts.

    Raises:
        InputError: metadata are missing, or the experts are chosen in another way than the family's.
    """
    experts, used = metadata.count(".expert_count"), metadata.count(".expert_used_count")
    if used > experts:
        raise InputError(f"{metadata.path}: {used} of {experts} experts are to be used")
    if metadata.count(".expert_shared_count", 0, least=0):
        raise InputError(f"{metadata.path}: it has shared experts, which are not read from GGUF")
    if metadata.count(".expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise InputError(f"{metadata.path}: its experts are not chosen by a softmax, as its family's are")
    if metadata.flag(".expert_weights_norm", mixture.normalized) != mixture.normalized:
        raise InputError(f"{metadata.path}: the weights of its experts are not scaled as its family's are")
    if metadata.has(".attention.clamp_kqv"):
        raise InputError(f"{metadata.path}: it clamps queries, keys and values, which is not read from GGUF")
    made = {mixture.count: experts, "num_experts_per_tok": used} | dict(mixture.constants)
    if metadata.has(".expert_feed_forward_length") or mixture.width != "intermediate_size":
        made[mixture.width] = metadata.count(".expert_feed_forward_length")
    return made


def expert_tensors(
    config: dict[str, Any], mixture: Mixture, layer: int
) -> Iterator[tuple[str, tuple[int, int, int], str]]:
    """The file's tensors of all experts in a layer: their names, shapes [experts, n, k], and trirun's names of the
    experts' own matrices, with {} for the expert's number."""
    experts, hidden, width = config[mixture.count], config["hidden_size"], config[mixture.width]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for part, stored in EXPERT_LAYERS.items():
        own = f"{layer_prefix(layer)}mlp.experts.{{}}.{part}{WEIGHT}"
        yield f"blk.{layer}.{stored}{WEIGHT}", (experts, *shapes[part]), own
