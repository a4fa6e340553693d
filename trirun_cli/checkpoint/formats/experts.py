"""The names of experts in directories of other programs: what trirun calls ``mlp.experts.3.gate``
(:mod:`trirun_kernels.weights.experts`) is ``mlp.experts.3.gate_proj`` in most of them, and in Mixtral's
``block_sparse_moe.experts.3.w1``."""

from __future__ import annotations

import re

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_LAYERS = {stored: own for own, stored in _MIXTRAL.items()} | {f"{own}_proj": own for own in _MIXTRAL}
_STORED = re.compile(rf"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.({'|'.join(_LAYERS)})")
_OWN = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)")
# Of these model types, other programs find the experts of :func:`stored_name`.
NAMED = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")


def own_name(stored: str) -> str:
    """trirun's name of a module, by another program's."""
    matched = _STORED.fullmatch(stored)
    return stored if matched is None else f"{matched[1]}.mlp.experts.{matched[2]}.{_LAYERS[matched[3]]}"


def stored_name(module: str, model_type: str) -> str:
    """The inverse, for a model of one of the types :data:`NAMED`."""
    matched = _OWN.fullmatch(module)
    if matched is None:
        return module
    before, expert, layer = matched.groups()
    if model_type == "mixtral":
        return f"{before}.block_sparse_moe.experts.{expert}.{_MIXTRAL[layer]}"
    return f"{before}.mlp.experts.{expert}.{layer}_proj"
