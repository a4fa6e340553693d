"""The norms and other vectors of a decoder, read from a checkpoint as float32. Nothing here imports torch."""

from __future__ import annotations

import numpy as np
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from ..errors import InputError
from .parts import OPTIONAL, SINKS, Description, MixtureNames, TensorNames, UnsupportedModel


def layer_vectors(source: SafetensorsDir, names: TensorNames, prefix: str, hidden: int) -> dict[str, np.ndarray]:
    """The vectors of a layer by the fields of :class:`~trirun_kernels.decoder.weights.LayerWeights`; ``prefix``: what
    its tensors' names begin with.

    Raises:
        UnsupportedModel: one is not there.
    """
    found = {}
    for field, tensor in names.vectors.items():
        if tensor is None:
            found[field] = np.ones(hidden, np.float32)
        elif prefix + tensor in source:
            offset = 0 if field.endswith("_bias") or field == SINKS else names.norm_offset
            found[field] = source.floats(prefix + tensor) + np.float32(offset)
        elif field not in OPTIONAL:
            raise UnsupportedModel(f"there is no tensor {prefix}{tensor}")
    return found


def router(source: SafetensorsDir, names: MixtureNames, prefix: str) -> dict[str, np.ndarray]:
    """The router of a layer's mixture of experts, by the fields of
    :class:`~trirun_kernels.decoder.weights.MixtureWeights`, with the shared expert's gate as its last row.

    Raises:
        UnsupportedModel: one is not there.
    """
    needed = {"router": names.router, "gate": names.shared_gate, "bias": names.bias, "correction": names.correction}
    tensors = {field: prefix + tensor for field, tensor in needed.items() if tensor is not None}
    if lost := [tensor for tensor in tensors.values() if tensor not in source]:
        raise UnsupportedModel(f"there is no tensor {lost[0]}")
    found = {field: source.floats(tensor) for field, tensor in tensors.items()}
    if "gate" in found:
        found["router"] = np.concatenate([found["router"], found.pop("gate")])
    return found


def final_norm(source: SafetensorsDir, found: Description, prefix: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The norm before the output head and its bias, scaled as the logits are.

    Raises:
        InputError: it is not there.
    """
    weight, bias, scale = f"{prefix}norm.weight", f"{prefix}norm.bias", np.float32(found.logit_scale)
    if weight in source:
        norm = source.floats(weight) + np.float32(found.names.norm_offset)
    elif None in found.names.vectors.values():
        norm = np.ones(found.shape.hidden, np.float32)
    else:
        raise InputError(f"{source.path} holds no {weight}")
    return norm * scale, source.floats(bias) * scale if bias in source else None
