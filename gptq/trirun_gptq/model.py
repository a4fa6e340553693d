"""A model, block by block: read, calibrate, quantize, hand over, forget."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .observer import Observer, Report
from .recipe import Recipe


class Writer(Protocol):
    """Receives the finished tensors in model order. It must not keep them longer than it needs."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Store one tensor under its checkpoint name. It lies on the CPU."""


def quantize_model(
    model_dir: str | Path,
    recipe: Recipe,
    calibration: list[Tensor],
    writer: Writer,
    observer: Observer | None = None,
    *,
    device: torch.device | str = "cpu",
    state_dir: str | Path | None = None,
) -> Report:
    """Quantize the linear layers of a Hugging Face decoder model, streaming one block at a time.

    The writer receives every tensor of the result: for each quantized module ``<name>.weight`` (int32 tile64 words),
    ``<name>.weight_scale`` (fp16), ``<name>.weight_zero`` (fp16, real-zero grids only) and ``<name>.bias`` where there
    is one; every other tensor of the source (embeddings, norms, lm_head, layers left as they are) unchanged, in its
    own dtype. A tied lm_head stays tied: it is not written when the source does not have it.

    Args:
        model_dir: a directory with config.json and safetensors (one file, or shards with their index).
        recipe: see :class:`~trirun_gptq.recipe.Recipe`.
        calibration: token ids, int64 [length] each, ``recipe.samples + recipe.held_out`` of them; the last
            ``held_out`` decide what is kept and are never trained on. See :func:`~trirun_gptq.calibration.load`.
        writer: see above.
        observer: see :class:`~trirun_gptq.observer.Observer`.
        device: where blocks are computed.
        state_dir: where finished blocks and activations are recorded, so that a killed run resumes; None records
            nothing. A state of another model, recipe or calibration is refused, not overwritten.

    Returns:
        Losses, times and memory; ``report.modules`` has each quantized module's name and spec for config.json.

    Raises:
        QuantizationError: the model has no list of decoder layers or layers this walk cannot quantize (fused experts,
            Conv1D), a tensor is missing or not finite, a group size does not divide k, or a Hessian cannot be factored.
    """
    raise NotImplementedError
