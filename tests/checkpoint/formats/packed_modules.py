"""Modules as the formats' own libraries packed them, with the values that these read; which ones, the table says
(trirun_cli/checkpoint/formats/README.md)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.checkpoint.formats.gguf_writer import DATA

_MODULES = np.load(DATA / "packed_modules.npz")


def packed_module(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Its tensors by name, and the weight float32 [32, 256]. ``name``: for example ``mlx_2bit_bonsai_g128``."""
    tensors = {}
    for key in _MODULES.files:
        owner, _, part = key.partition(".tensors.")
        if owner == name and part:
            tensor = torch.from_numpy(_MODULES[key].copy())
            tensors[part.removesuffix(".bfloat16")] = tensor.view(torch.bfloat16) if "bfloat16" in part else tensor
    return tensors, torch.from_numpy(_MODULES[f"{name}.values"].copy())
