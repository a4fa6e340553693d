"""A packed checkpoint as the place where ``trirun finetune`` begins."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import torch
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.model.loader import TensorSource
from trirun_gptq.recipe import GRIDS, Grid
from trirun_gptq.train.recipe import TrainRecipe
from trirun_gptq.train.start import Grids
from trirun_gptq.train.student import Student
from trirun_kernels import unpack
from trirun_kernels.weights.names import WEIGHT

from ..checkpoint.reader import Checkpoint
from ..errors import InputError


def checkpoint_grids(path: Path, linears: dict[str, tuple[int, int]]) -> Grids:
    """The grids of a packed checkpoint's modules; ternary if none of them uses code 3."""
    opened = Checkpoint(path)
    for name in opened.modules:
        if linears.get(name) != opened.shape(name):
            raise InputError(f"{path} holds {name} {list(opened.shape(name))}, which the model does not have")
    ternary = all(bool((unpack(opened.packed(name))[0] < 3).all()) for name in opened.modules)
    specs = {name: opened.format.spec(name) for name in opened.modules}
    return {name: Grid(spec, ternary and spec.zero == 1) for name, spec in specs.items()}


def with_grid(recipe: TrainRecipe, grids: Grids) -> TrainRecipe:
    """The recipe as it should read: with the grid that most of the checkpoint's modules have."""
    spec, ternary = Counter(grids.values()).most_common(1)[0][0]
    name = "ternary" if ternary else next((name for name, zero in GRIDS.items() if zero == spec.zero), recipe.grid)
    return dataclasses.replace(recipe, grid=name, group_size=spec.group_size)


@torch.no_grad()
def load_start(path: Path, student: Student) -> dict[str, Quantized]:
    """Codes and scales of a packed checkpoint; everything else it holds goes straight into the student."""
    opened, stored = Checkpoint(path), TensorSource(path).stored
    for name, parameter in student.model.named_parameters():
        if name in stored and name.removesuffix(WEIGHT) not in opened.modules:
            parameter.copy_(stored.read(name))
    return {name: Quantized(*unpack(opened.packed(name)), opened.format.spec(name)) for name in opened.modules}
