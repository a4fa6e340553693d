"""Where training on a grid begins: at the nearest codes, or where GPTQ got to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_kernels import PackedWeight, QuantSpec, unpack
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..errors import QuantizationError, ScaleError
from ..layer.quantized import Quantized
from ..layer.scale_search import round_to_nearest
from ..model.loader import TensorSource, decoder_blocks, linear_layers
from ..model.writer import Collected
from ..pipeline import quantize_model
from ..recipe import Grid
from ..run.progress import Event, Planned, ProgressCallback, Stage
from ..run.report import BlockReport
from .recipe import TrainRecipe

Grids = dict[str, Grid]  # by module name


def recipe_grids(model: Any, recipe: TrainRecipe) -> Grids:
    """The linear layers of a model's decoder blocks that a recipe trains.

    Raises:
        QuantizationError: none is left, or a group size does not divide a layer's inputs.
    """
    choices, blocks = recipe.quantization(), f"{decoder_blocks(model)[0]}."
    grids: Grids = {}
    for name, layer in linear_layers(model).items():
        grid = choices.choice(name) if name.startswith(blocks) else None
        if grid is None:
            continue
        try:
            grid.spec.groups(layer.in_features)
        except ValueError as error:
            raise QuantizationError(f"{name}: {error}; choose another group size") from None
        grids[name] = grid
    if not grids:
        raise QuantizationError("no linear layer of the decoder blocks is left to train")
    return grids


def nearest(source: TensorSource, grids: Grids, device: torch.device) -> dict[str, Quantized]:
    """Every weight rounded to the nearest code, with the scales of least squared error.

    Raises:
        QuantizationError: a scale does not fit fp16; the layer is named.
    """
    start = {}
    for name, grid in grids.items():
        weight = source.read(f"{name}.weight").to(device, torch.float32)
        try:
            start[name] = round_to_nearest(weight, grid.spec, levels=grid.levels)
        except ScaleError as error:
            raise QuantizationError(f"{name}: {error}") from None
    return start


def _blocks_done(progress: ProgressCallback) -> ProgressCallback:
    """Passes on how many blocks are done, as the stage ``start``."""
    total = 0

    def listen(event: Event) -> None:
        nonlocal total
        if isinstance(event, Planned):
            total = event.blocks
            progress(Stage("start", 0, total))
        elif isinstance(event, BlockReport):
            progress(Stage("start", event.index + 1, total))

    return listen


def gptq(
    model_dir: str | Path,
    recipe: TrainRecipe,
    stream: Tensor,
    device: torch.device,
    state_dir: Path | None,
    progress: ProgressCallback,
) -> dict[str, Quantized]:
    """The solution of the ``fast`` preset on the first tokens of the training text.

    Args:
        stream: int64 [tokens]. state_dir: keeps finished blocks, so that a stopped run need not repeat them.
        progress: is told of the stage ``start``, in blocks.

    Raises:
        QuantizationError: the text is too short, or see :func:`trirun_gptq.pipeline.quantize_model`.
    """
    settings = recipe.quantization()
    settings = dataclasses.replace(settings, samples=min(settings.samples, len(stream) // recipe.seqlen - 2))
    held_out = min(settings.held_out, len(stream) // recipe.seqlen - settings.samples)
    if settings.samples < 1:
        raise QuantizationError(
            f"init: gptq needs three sequences of {recipe.seqlen}, and there are {len(stream)} tokens"
        )
    settings = dataclasses.replace(settings, held_out=held_out)
    sequences = list(stream[: (settings.samples + held_out) * recipe.seqlen].view(-1, recipe.seqlen))
    written = Collected()
    report = quantize_model(
        model_dir, settings, sequences, written, _blocks_done(progress), device=device, state_dir=state_dir
    )
    shapes = ((module.name, module.n, module.k, module.spec) for module in report.modules)
    return collected(written, shapes)


def collected(tensors: dict[str, Tensor], modules: Iterable[tuple[str, int, int, QuantSpec]]) -> dict[str, Quantized]:
    """Weights (name, n, k, grid) unpacked from tensors named as in a checkpoint."""
    start = {}
    for name, n, k, spec in modules:
        parts = tensors[name + WEIGHT], tensors[name + SCALE], tensors.get(name + ZERO)
        start[name] = Quantized(*unpack(PackedWeight(*parts, n, k, spec)), spec)
    return start
