"""``trirun finetune`` without its terminal: plan, train, publish, check."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import TensorSource
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.run.resume import fingerprint
from trirun_gptq.train import start as starts
from trirun_gptq.train.data import load_text
from trirun_gptq.train.model import Trained, compute_dtype, train_model
from trirun_gptq.train.progress import TrainObserver
from trirun_gptq.train.recipe import INITS, TrainRecipe, load_train_recipe
from trirun_gptq.train.state import TrainState
from trirun_gptq.train.student import Student
from trirun_gptq.train.workers import Workers
from trirun_kernels import QuantSpec

from .. import __version__
from ..backends.device import pick_device
from ..backends.transformers.weights import longest_sequence
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.reader import Checkpoint
from ..checkpoint.writer import CheckpointWriter, file_hash
from ..errors import InputError, UsageError
from ..resources import configs_dir
from ..text.detokenizer import load_tokenizer
from .finetune_publish import check, finishing, publish
from .finetune_start import checkpoint_grids, load_start, with_grid


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that was checked but not started.

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
    grids: dict[str, tuple[QuantSpec, bool]]
    linears: dict[str, tuple[int, int]]
    overwrite: bool

    @property
    def weights(self) -> int:
        """Weights that will be trained on their grid."""
        return sum(math.prod(self.linears[name]) for name in self.grids)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of each of them, scales included."""
        sizes = [(math.prod(self.linears[name]), spec, self.linears[name][1]) for name, (spec, _) in self.grids.items()]
        return sum(size * spec.bits_per_weight(k) for size, spec, k in sizes) / self.weights

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and for the recipe file."""
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


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run.

    Attributes:
        trained: the library's outcome.
        bytes_before, bytes_after: of weight files.
        trained_ppl, packed_ppl: perplexity of the trained weights in float32 and of the packed checkpoint on trirun's
            kernels, on the same held-out windows.
        finishing: seconds from the end of training to that comparison. seconds: of this sitting.
    """

    trained: Trained
    bytes_before: int
    bytes_after: int
    trained_ppl: float
    packed_ppl: float
    finishing: float
    seconds: float


def plan_run(
    model: Path,
    out: Path,
    *,
    method: str,
    recipe_file: Path | None,
    settings: Mapping[str, Any],
    data: list[str],
    device: str,
    compiled: bool | None,
    overwrite: bool,
) -> Plan:
    """Resolve and check everything that can be checked before the long part.

    Args:
        method: names ``configs/finetune-METHOD.yaml``. recipe_file: replaces it.
        settings: recipe keys given on the command line; they win over the recipe.
        data: sources of text, see :func:`trirun_gptq.calibration.load`; none takes the demo model's excerpt.
        compiled: None compiles on a GPU.

    Raises:
        UsageError, InputError, QuantizationError: an option, the model, the recipe or the output does not fit.
    """
    source = ModelDir(model)
    if source.quant_method is not None:
        raise InputError(
            f"{model} is quantized already (quant_method {source.quant_method!r})",
            "give the original model, and the checkpoint to begin from as --init",
        )
    recipe = load_train_recipe(recipe_file or configs_dir() / f"finetune-{method}.yaml")
    if recipe.method == "absmean" and "init" in settings:
        raise UsageError(f"--init {settings['init']}: {recipe.name} begins at the original weights")
    recipe = with_settings(recipe, settings)
    data = data or [str(configs_dir() / "demo-model" / "calibration.txt")]
    for text in data:
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
    if _from_checkpoint(recipe):
        grids = checkpoint_grids(Path(recipe.init), linears)
        recipe = with_grid(recipe, grids)
    else:
        grids = starts.recipe_grids(skeleton, recipe)
    return Plan(model, out, recipe, data, target, compiled, grids, linears, overwrite)


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


def run(plan: Plan, observer: TrainObserver, *, resume: bool, started: float | None = None) -> Result | None:
    """Train as planned and publish the checkpoint; on any exception before that nothing appears at ``plan.out``.

    With ``resume``, the state of the run is kept in ``OUT.state`` until the checkpoint is complete. ``started`` is
    ``time.perf_counter()`` when the command began, from which its minutes count.

    Returns:
        the outcome; None in all but the first of several processes.

    Raises:
        CheckFailed: the packed checkpoint does not answer as the trained weights do.
    """
    started = time.perf_counter() if started is None else started
    workers = Workers(torch.device(plan.device))
    if not workers.first:
        _train(plan, TrainObserver(), workers, resume, started)
        return None
    # Entered before anything is computed: a second run to the same place would share this one's state.
    with CheckpointWriter(plan.out, ModelDir(plan.model), overwrite=plan.overwrite) as writer:
        trained, held_out = _train(plan, observer, workers, resume, started)
        trained_at = time.perf_counter()
        publish(plan, trained.student, writer)
        first, second = check(plan, trained.student, held_out)
        shutil.rmtree(_state_dir(plan), ignore_errors=True)
    before = sum(file.stat().st_size for file in ModelDir(plan.model).files)
    after = sum(file.stat().st_size for file in plan.out.glob("*.safetensors"))
    now = time.perf_counter()
    return Result(trained, before, after, first, second, now - trained_at, now - started)


def _train(
    plan: Plan, observer: TrainObserver, workers: Workers, resume: bool, started: float
) -> tuple[Trained, Tensor]:
    """The outcome, and the held-out windows int64 [windows, seqlen]."""
    recipe, source, directory = plan.recipe, TensorSource(plan.model), _state_dir(plan)
    tokenizer = load_tokenizer(plan.model)
    stream, held_out = load_text(plan.data, tokenizer, recipe.seqlen, recipe.held_out, recipe.seed)
    state = TrainState(directory, _fingerprint(plan, source, stream, workers)) if resume else None

    def begin(student: Student) -> None:
        if _from_checkpoint(recipe):
            start = load_start(Path(recipe.init), student)
        elif recipe.method == "absmean":
            start = {}
        elif recipe.init == "gptq":
            # Every process walks the blocks together: all of them must find the same ones finished.
            kept = directory / "start" if resume else None
            start = starts.gptq(plan.model, recipe, stream, workers.device, kept, observer.stage)
        else:
            start = starts.nearest(source, plan.grids, workers.device)
        student.begin(source, start)

    trained = train_model(
        plan.model,
        recipe,
        plan.grids,
        begin,
        stream,
        held_out,
        observer,
        workers=workers,
        compiled=plan.compiled,
        state=state,
        started=started,
        finishing=lambda student: finishing(plan, student, held_out),
    )
    return trained, held_out


def _state_dir(plan: Plan) -> Path:
    return plan.out.with_name(plan.out.name + ".state")


def _from_checkpoint(recipe: TrainRecipe) -> bool:
    return recipe.method == "learned" and recipe.init not in INITS


def _fingerprint(plan: Plan, source: TensorSource, stream: Tensor, workers: Workers) -> dict[str, str]:
    """What must be equal for a stopped run to be continued."""
    # The schedule follows the clock, so a stopped run may be given more minutes.
    recipe = dataclasses.replace(plan.recipe, minutes=float(plan.recipe.minutes > 0))
    begin = "".join(map(file_hash, Checkpoint(recipe.init).files)) if _from_checkpoint(recipe) else ""
    return fingerprint(source, recipe, [stream], workers.device) | {
        "start": begin,
        "compute": f"{'compiled' if plan.compiled else 'eager'}, {workers.count} processes",
    }
