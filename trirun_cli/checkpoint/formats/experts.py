"""The names of experts in directories of other programs: what trirun calls ``mlp.experts.3.gate``
(:mod:`trirun_kernels.weights.experts`) is ``mlp.experts.3.gate_proj`` in most of them, and in Mixtral's
``block_sparse_moe.experts.3.w1``. MLX has one tensor for the same matrix of all experts,
``mlp.switch_mlp.gate_proj`` [experts, n, k]."""

from __future__ import annotations

import re
from dataclasses import replace

from trirun_kernels.weights.safetensors_file import StoredTensor

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_LAYERS = {stored: own for own, stored in _MIXTRAL.items()} | {f"{own}_proj": own for own in _MIXTRAL}
_STORED = re.compile(rf"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.({'|'.join(_LAYERS)})")
_OWN = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate|up|down)")
_STACKED = re.compile(r"(.*)\.switch_mlp\.((?:gate|up|down)_proj)((?:\.\w+)?)")
_OF_STACK = re.compile(r"\.experts\.\d+(?=\.(?:gate|up|down)_proj$)")
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


def stacked_name(module: str, model_type: str) -> str | None:
    """MLX's name of the module that holds this expert's matrix and those of all others; None for no expert's."""
    matched = _OWN.fullmatch(module)
    if matched is None:
        return None
    return f"{matched[1]}.{'block_sparse_moe' if model_type == 'mixtral' else 'mlp'}.switch_mlp.{matched[3]}_proj"


def stack_of(module: str) -> str:
    """The module of MLX's that a module of :func:`split_stacks` was cut from; the module itself if from none."""
    return _OF_STACK.sub(".switch_mlp", module)


def split_stacks(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of an MLX directory by name, those of all experts cut into one an expert: ``…experts.3.gate_proj``.

    A tensor of no dimension stays whole."""
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        matched = _STACKED.fullmatch(name)
        if matched is None or not stored.shape or not stored.shape[0]:
            made[name] = stored
            continue
        size = stored.nbytes // stored.shape[0]
        for expert in range(stored.shape[0]):
            own = f"{matched[1]}.experts.{expert}.{matched[2]}{matched[3]}"
            made[own] = replace(stored, start=stored.start + expert * size, nbytes=size, shape=stored.shape[1:])
    return dict(sorted(made.items()))
