"""The beginning of ``trirun finetune``: options resolved, and all that can be checked before the long part."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import TensorSource, decoder_blocks, kept_modules
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.run.preflight import require_finite
from trirun_gptq.run.progress import Event, ProgressCallback, Warned, silent
from trirun_gptq.train import start as starts
from trirun_gptq.train.model import compute_dtype
from trirun_gptq.train.recipe import INITS, TrainRecipe, load_train_recipe
from trirun_gptq.train.start import Grids

from ..backends.device import pick_device
from ..backends.transformers.weights import longest_sequence
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError
from ..resources import configs_dir
from ..version import __version__
from .finetune_start import checkpoint_grids, with_grid
from .output import in_words, model_origin, text_origin
from .settings import given

METHODS = ("learned", "trilm", "bitnet")


@dataclass(frozen=True, slots=True)
class FinetunePlan(Event):
    """A run that was checked but not started; the first event of a run.

    Attributes:
        model, out: the two directories. recipe: fully resolved, ``precision`` included. data: where text comes from.
        device: a torch device. compiled: fuse with ``torch.compile``.
        grids: the layers to train. linears: every linear module of the model, name to (n, k).
        overwrite: replace a non-empty ``out``.
    """

    model: Path
    out: Path
    recipe: TrainRecipe
    data: list[str]
    device: str
    compiled: bool
    grids: Grids
    linears: dict[str, tuple[int, int]]
    overwrite: bool

    @property
    def weights(self) -> int:
        """Weights that will be trained on their grid."""
        return sum(math.prod(self.linears[name]) for name in self.grids)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of each of them, scales included."""
        sizes = [(math.prod(self.linears[name]), grid.spec, self.linears[name][1]) for name, grid in self.grids.items()]
        return sum(size * spec.bits_per_weight(k) for size, spec, k in sizes) / self.weights

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "trirun": __version__,
            "command": "finetune",
            "model": str(self.model),
            "data": self.data,
            "device": self.device,
            "compiled": self.compiled,
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight,
            "recipe": self.recipe.to_dict(),
        }

    def to_recipe(self) -> dict[str, Any]:
        """Plain values for the recipe file, which is published with the checkpoint: names and hashes, no paths."""
        plain = self.to_dict()
        plain |= {"model": model_origin(self.model), "data": [text_origin(text) for text in self.data]}
        if from_checkpoint(self.recipe):
            begin = Path(self.recipe.init)
            plain["start"] = model_origin(begin)
            plain["recipe"] = plain["recipe"] | {"init": begin.resolve().name}
        return plain


def plan_finetune(
    model: Path,
    out: Path,
    *,
    method: str,
    recipe: TrainRecipe | str | Path | None,
    settings: Mapping[str, Any],
    data: Sequence[str],
    device: str,
    compiled: bool | None,
    overwrite: bool,
    progress: ProgressCallback = silent,
) -> FinetunePlan:
    """Resolve and check everything that can be checked before the long part.

    Args:
        progress: is warned of what the user should know before the run. The others: see
            :func:`~trirun_cli.workflows.finetune.finetune`.

    Raises:
        UsageError, InputError, QuantizationError: an argument, the model, the recipe or the output does not fit.
    """
    if method not in METHODS:
        raise UsageError(f"--method {method}: one of {', '.join(METHODS)}")
    source = ModelDir(model)
    if source.quant_method is not None:
        raise InputError(
            f"{model} is quantized already (quant_method {source.quant_method!r})",
            "give the original model, and the checkpoint to begin from as --init",
        )
    if not isinstance(recipe, TrainRecipe):
        recipe = load_train_recipe(recipe or configs_dir() / f"finetune-{method}.yaml")
    settings = given(TrainRecipe, settings)
    if recipe.method == "absmean" and "init" in settings:
        raise UsageError(f"--init {settings['init']}: {recipe.name} begins at the original weights")
    recipe = with_settings(recipe, settings)
    sources = [str(text) for text in data] or [str(configs_dir() / "demo-model" / "calibration.txt")]
    for text in sources:
        if not text.startswith("hf:") and not Path(text).is_file():
            raise InputError(f"--data {text}: no such file")
    target = pick_device(device)
    dtype = compute_dtype(recipe.precision, torch.device(target))
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    recipe = dataclasses.replace(recipe, precision=names[dtype])
    compiled = target != "cpu" if compiled is None else compiled
    # Refuses a non-empty output before the long part.
    CheckpointWriter(out, source, overwrite=overwrite)
    skeleton = meta_model(source.path)
    context = longest_sequence(skeleton.config.get_text_config())
    if recipe.seqlen > context:
        raise UsageError(f"--seqlen {recipe.seqlen}: the model's context ends at {context} tokens")
    linears = linear_modules(skeleton)
    if from_checkpoint(recipe):
        grids = checkpoint_grids(Path(recipe.init), linears)
        recipe = with_grid(recipe, grids)
    else:
        grids = starts.recipe_grids(skeleton, recipe)
    blocks, block_list = decoder_blocks(skeleton)
    if kept := {f"{blocks}.{name}": kind for name, kind in kept_modules(block_list).items()}:
        progress(Warned(f"kept in 16 bits, as 2 bits do not fit them: {in_words(kept)}"))
    require_finite(TensorSource(source.path), progress)
    if not data:
        message = "training on the short prose excerpt that ships with trirun; give --data with much more text"
        progress(Warned(message))
    return FinetunePlan(model, out, recipe, sources, target, compiled, grids, linears, overwrite)


def from_checkpoint(recipe: TrainRecipe) -> bool:
    """Whether training begins at a packed checkpoint, whose directory is ``recipe.init``."""
    return recipe.method == "learned" and recipe.init not in INITS


def with_settings(recipe: TrainRecipe, settings: Mapping[str, Any]) -> TrainRecipe:
    """The recipe with what was given on the command line in its place.

    Raises:
        UsageError: a value is out of range, or does not go with another one; the options are named.
    """
    try:
        # All at once: --kl 0 alone would leave nothing to train towards, --kl 0 --ce 1 does not.
        return dataclasses.replace(recipe, **settings)
    except QuantizationError as error:
        reason = str(error).removeprefix("recipe: ")
        named = {key: value for key, value in settings.items() if re.search(rf"\b{key}\b", reason)}
        shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in named.items()}
        options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in shown.items())
        # The recipe was in order without them.
        raise UsageError(f"{options}: {reason}" if options else reason) from None
