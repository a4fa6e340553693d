"""The norms and other vectors of a decoder, read from a checkpoint as float32. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from trirun_kernels.weights.names import WEIGHT
from trirun_kernels.weights.safetensors_dir import SafetensorsDir

from ..errors import InputError
from .parts import NO_NORMS, OPTIONAL, Description, MixtureNames, TensorNames, UnsupportedModel


def layer_vectors(
    source: SafetensorsDir, names: TensorNames, prefix: str, lengths: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The vectors of a layer by the fields of :class:`~trirun_kernels.decoder.weights.LayerWeights`; ``prefix``: what
    its tensors' names begin with; ``lengths``: of :func:`~trirun_kernels.decoder.weights.vector_lengths`.

    Raises:
        UnsupportedModel: one is not there.
    """
    found = {}
    for field, tensor in names.vectors.items():
        if tensor is None:
            found[field] = np.ones(lengths[field], np.float32)
        elif prefix + tensor in source:
            offset = 0 if field.endswith("_bias") or field in NO_NORMS else names.norm_offset
            found[field] = source.floats(prefix + tensor) + np.float32(offset)
        elif field not in OPTIONAL:
            raise UnsupportedModel(f"there is no tensor {prefix}{tensor}")
    return found


def router(
    source: SafetensorsDir,
    names: MixtureNames,
    prefix: str,
    read: Callable[[str], np.ndarray],
    mlp_norm: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The router of a layer's mixture of experts, by the fields of
    :class:`~trirun_kernels.decoder.weights.MixtureWeights`, with the shared expert's gate as its last row; ``read``:
    the weight of a module of the layer, packed or not, as float32. A router's own scale is folded into it, as it reads
    the row that has been multiplied by ``mlp_norm``, float32 [hidden].

    Raises:
        UnsupportedModel: one is not there, or a weight of that norm is 0, so that such a router cannot be folded.
        InputError: sizes do not fit together.
    """
    needed = {"router": names.router, "bias": names.bias, "correction": names.correction}
    needed |= {"scale": names.router_scale, "expert_scale": names.expert_scale}
    if names.linear_router:
        del needed["router"]
    tensors = {field: prefix + tensor for field, tensor in needed.items() if tensor is not None}
    if lost := [tensor for tensor in tensors.values() if tensor not in source]:
        raise UnsupportedModel(f"there is no tensor {lost[0]}")
    found = {field: source.floats(tensor) for field, tensor in tensors.items()}
    if names.linear_router:
        found["router"] = read(names.router.removesuffix(WEIGHT))
    if (scale := found.pop("scale", None)) is not None:
        found["router"] = _folded(prefix + names.router, found["router"], scale, mlp_norm)
    if names.shared_gate is not None:
        found["router"] = np.concatenate([found["router"], read(names.shared_gate)])
    return found


def _folded(name: str, router: np.ndarray, scale: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
    """A router [experts, hidden] that reads rows times ``norm`` in place of rows times ``scale`` / √hidden."""
    for vector in (scale,) if norm is None else (scale, norm):
        if vector.shape != router.shape[1:]:
            raise InputError(f"{name} has shape {list(router.shape)}, its scale or its norm {list(vector.shape)}")
    with np.errstate(all="ignore"):
        factor = scale / np.float32(scale.size**0.5) / (np.float32(1) if norm is None else norm)
    if not np.isfinite(factor).all():
        raise UnsupportedModel(f"{name} reads what a weight of 0 of the norm before the experts takes away")
    return router * factor


def final_norm(source: SafetensorsDir, found: Description, prefix: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The norm before the output head and its bias, scaled as the logits are.

    Raises:
        InputError: it is not there.
    """
    weight, bias, scale = f"{prefix}norm.weight", f"{prefix}norm.bias", np.float32(found.logit_scale)
    if weight in source:
        norm = source.floats(weight) + np.float32(found.names.norm_offset)
    elif found.names.vectors.get("mlp_norm", "") is None:
        norm = np.ones(found.shape.hidden, np.float32)
    else:
        raise InputError(f"{source.path} holds no {weight}")
    return norm * scale, source.floats(bias) * scale if bias in source else None
