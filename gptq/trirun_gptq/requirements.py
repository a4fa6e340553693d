"""What must hold before a run: said before the first block is read, not after an hour."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import QuantizationError
from .model.loader import Skeleton, linear_layers
from .recipe import Recipe


def require_calibration(calibration: list[Tensor], recipe: Recipe, skeleton: Skeleton) -> None:
    needed = recipe.samples + recipe.held_out
    if len(calibration) != needed:
        raise QuantizationError(
            f"{len(calibration)} calibration sequences were given; the recipe asks for {recipe.samples} and "
            f"{recipe.held_out} held out"
        )
    vocabulary = skeleton.model.get_input_embeddings().weight.shape[0]
    context = getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)
    for i, sequence in enumerate(calibration):
        if sequence.dim() != 1 or sequence.dtype != torch.int64 or len(sequence) < 2:
            raise QuantizationError(
                f"calibration sequence {i} must be int64 [length ≥ 2], got {sequence.dtype} {list(sequence.shape)}"
            )
        if context is not None and len(sequence) > context:
            raise QuantizationError(
                f"calibration sequence {i} has {len(sequence)} tokens; the model's context ends at {context}"
            )
        low, high = int(sequence.min()), int(sequence.max())
        if low < 0 or high >= vocabulary:
            raise QuantizationError(
                f"calibration sequence {i} has tokens {low}..{high}; the model's vocabulary is 0..{vocabulary - 1}"
            )


def require_group_sizes(skeleton: Skeleton, recipe: Recipe) -> None:
    """Every layer's group size divides its k: said before the first block is read, not after an hour."""
    for index, block in enumerate(skeleton.blocks):
        for path, layer in linear_layers(block).items():
            name = f"{skeleton.block_name(index)}.{path}"
            choice = recipe.choice(name)
            try:
                if choice is not None:
                    choice[0].groups(layer.in_features)
            except ValueError as error:
                raise QuantizationError(f"{name}: {error}; choose another group size or override this one") from None
