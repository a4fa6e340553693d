"""A model, block by block: read, calibrate, quantize, hand over, forget."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .activations import Batch, capture, make_batches
from .block import BlockResult, BlockRun
from .errors import QuantizationError
from .observer import Observer, Report
from .quantized import Quantized
from .recipe import Recipe
from .source import Skeleton, TensorSource, linear_layers
from .state import RunState, fingerprint


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
    observer = observer or Observer()
    device = torch.device(device)
    started = time.perf_counter()
    source = TensorSource(model_dir)
    skeleton = Skeleton(source)
    _require_calibration(calibration, recipe, skeleton)
    _require_group_sizes(skeleton, recipe)
    report = Report(tokens=sum(len(sequence) for sequence in calibration[: recipe.samples]))
    modules = sum(len(linear_layers(block)) for block in skeleton.blocks)
    observer.plan(len(skeleton.blocks), modules, report.tokens)

    state = RunState(state_dir, fingerprint(source, recipe, calibration, device)) if state_dir is not None else None
    train, held_out = _embed(skeleton, calibration, recipe, device, observer)
    report.stage_seconds["embed"] = time.perf_counter() - started
    _copy_rest(source, skeleton, writer)
    for index in range(len(skeleton.blocks)):
        observer.block_started(index, len(skeleton.blocks), skeleton.block_name(index))
        result = _block(skeleton, index, train, held_out, recipe, device, observer, state)
        _write_block(source, skeleton.block_name(index), result.quantized, writer)
        report.modules += result.modules
        report.kept += [f"{skeleton.block_name(index)}.{name}" for name in result.kept]
        report.blocks.append(result.report)
        observer.block_finished(result.report)
    report.stage_seconds["blocks"] = time.perf_counter() - started - report.stage_seconds["embed"]
    report.peak_bytes = _peak_bytes()
    return report


def _block(
    skeleton: Skeleton,
    index: int,
    train: list[Batch],
    held_out: list[Batch],
    recipe: Recipe,
    device: torch.device,
    observer: Observer,
    state: RunState | None,
) -> BlockResult:
    """One block quantized, or taken from the state of a run that was stopped; the activations move on either way."""
    run = BlockRun(skeleton, index, train, held_out, recipe, device, observer)
    finished = state.load(index) if state is not None else None
    if finished is not None:
        run.restore(finished.quantized)
        for module in finished.modules:
            observer.module_finished(module)
        return finished
    result = run.run()
    if state is not None:
        state.save(index, result)
    return result


def _embed(
    skeleton: Skeleton, calibration: list[Tensor], recipe: Recipe, device: torch.device, observer: Observer
) -> tuple[list[Batch], list[Batch]]:
    """Both parts of the calibration sequences, embedded."""
    skeleton.load_rest(device)
    parts = make_batches(calibration[: recipe.samples]), make_batches(calibration[recipe.samples :], recipe.samples)
    total = len(parts[0]) + len(parts[1])
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        observer.stage("embed", done, total)

    train, held_out = (capture(skeleton, part, device, step) for part in parts)
    return train, held_out


def _write_block(source: TensorSource, block: str, quantized: dict[str, Quantized], writer: Writer) -> None:
    """A block's packed weights, and its other tensors as they are."""
    for name, weight in quantized.items():
        packed = weight.pack()
        writer.add(f"{block}.{name}.weight", packed.words.cpu())
        writer.add(f"{block}.{name}.weight_scale", packed.scales.cpu())
        if packed.zeros is not None:
            writer.add(f"{block}.{name}.weight_zero", packed.zeros.cpu())
    replaced = {f"{block}.{name}.weight" for name in quantized}
    for name in source.names:
        if name.startswith(f"{block}.") and name not in replaced:
            writer.add(name, source.read(name))


def _copy_rest(source: TensorSource, skeleton: Skeleton, writer: Writer) -> None:
    for name in source.names:
        if not name.startswith(f"{skeleton.blocks_name}."):
            writer.add(name, source.read(name))


def _require_calibration(calibration: list[Tensor], recipe: Recipe, skeleton: Skeleton) -> None:
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


def _require_group_sizes(skeleton: Skeleton, recipe: Recipe) -> None:
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


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
