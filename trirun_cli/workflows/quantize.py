"""``trirun quantize`` without its terminal: plan, run, publish."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from trirun_gptq import calibration as calibration_data
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import decoder_blocks
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.pipeline import quantize_model
from trirun_gptq.recipe import Override, Recipe, load_recipe
from trirun_gptq.run import distributed as ranks
from trirun_gptq.run.progress import Observer, Report
from trirun_kernels import QuantSpec

from .. import __version__
from ..backends.device import pick_device
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError, explain
from ..resources import configs_dir
from ..text.detokenizer import load_tokenizer

# Tokens of the sample that a finished run shows.
SAMPLE_PROMPT = 16
SAMPLE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that was checked but not started.

    Attributes:
        model, out: the two directories. recipe: fully resolved. calibration: where its text comes from.
        device: a torch device. linears: every linear module of the model, name to (n, k).
        blocks: what the names of those inside the decoder blocks begin with; the others are kept.
        overwrite: replace a non-empty ``out``.
    """

    model: Path
    out: Path
    recipe: Recipe
    calibration: str
    device: str
    linears: dict[str, tuple[int, int]]
    blocks: str
    overwrite: bool

    @property
    def weights(self) -> int:
        """Weights that will be quantized."""
        return sum(n * k for n, k, _ in self._chosen())

    @property
    def packed_bytes(self) -> int:
        """What they will take, scales included."""
        return round(sum(n * k * spec.bits_per_weight(k) / 8 for n, k, spec in self._chosen()))

    def _chosen(self) -> Iterator[tuple[int, int, QuantSpec]]:
        for name, (n, k) in self.linears.items():
            choice = self.recipe.choice(name) if name.startswith(self.blocks) else None
            if choice is not None:
                yield n, k, choice[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and for the recipe file."""
        return {
            "trirun": __version__,
            "command": "quantize",
            "model": str(self.model),
            "calibration": self.calibration,
            "device": self.device,
            "weights": self.weights,
            "packed_bytes": self.packed_bytes,
            "recipe": self.recipe.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run: the library's report, bytes of weight files before and after, and a sample of the result's text
    (``prompt``, ``text``; None where the result could not be run here, which ``warning`` then explains)."""

    report: Report
    bytes_before: int
    bytes_after: int
    sample: dict[str, str] | None
    warning: str | None = None


def plan_run(
    model: Path,
    out: Path,
    *,
    preset: str,
    recipe_file: Path | None,
    settings: Mapping[str, Any],
    overrides: list[str],
    calibration: str | None,
    device: str,
    overwrite: bool,
    warn: Callable[[str], None],
) -> Plan:
    """Resolve and check everything that can be checked before the long part.

    Args:
        settings: recipe keys given on the command line; they win over the recipe.
        overrides: ``REGEX=keep``, ``REGEX=g64``, ``REGEX=zero``, in the order given; the last match wins.
        calibration: see :func:`trirun_gptq.calibration.load`; None takes the excerpt that ships with the demo model.
        warn: receives what the user should know before the run.

    Raises:
        UsageError, InputError, QuantizationError: an option, the model, the recipe, the text or the output does not
            fit.
    """
    source = ModelDir(model)
    if source.quant_method is not None:
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    recipe = with_options(load_recipe(recipe_file or configs_dir() / f"{preset}.yaml"), settings, overrides)
    if calibration is None:
        calibration = str(configs_dir() / "demo-model" / "calibration.txt")
        wanted = recipe.samples
        if "samples" not in settings:
            recipe = _within_excerpt(recipe, calibration, model)
        fewer = f" ({recipe.samples} sequences, recipe {recipe.name!r} has {wanted})" if recipe.samples < wanted else ""
        warn(
            f"calibrating on the short prose excerpt that ships with trirun{fewer}; "
            "--calibration with text like the model's own use gives a better model"
        )
    calibration_data.check_source(calibration)
    # Refuses a non-empty output before the long part.
    CheckpointWriter(out, source, overwrite=overwrite)
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    blocks = f"{decoder_blocks(skeleton)[0]}."
    inside = [name for name in linears if name.startswith(blocks)]
    for pattern in (*recipe.ignore, *recipe.overrides):
        if not any(re.search(pattern, name) for name in inside):
            raise UsageError(
                f"{pattern!r} matches none of the {len(inside)} linear layers in the decoder blocks",
                f"their names are like {inside[-1]}" if inside else None,
            )
    choices = {name: choice for name in inside if (choice := recipe.choice(name)) is not None}
    if not choices:
        raise UsageError(
            f"none of the {len(inside)} linear layers in the decoder blocks is left to quantize",
            "fewer patterns of --override REGEX=keep, or of the recipe's ignore",
        )
    for name, choice in choices.items():
        k = linears[name][1]
        if choice[0].group_size > 0 and k % choice[0].group_size:
            fits = next(size for size in (64, 32, -1) if size == -1 or k % size == 0)
            raise UsageError(
                f"{name} has k={k} input features, not a multiple of group size {choice[0].group_size}",
                f"--group-size {fits}, or for these layers alone: --override '{name.rsplit('.', 1)[-1]}=g{fits}'",
            )
    return Plan(model, out, recipe, calibration, pick_device(device), linears, blocks, overwrite)


def _within_excerpt(recipe: Recipe, excerpt: str, model: Path) -> Recipe:
    """The recipe with as many samples as the excerpt has of its length, which is a matter of the model's tokenizer."""
    tokens = len(calibration_data.load_stream(excerpt, load_tokenizer(model), recipe.seed))
    samples = min(recipe.samples, tokens // recipe.seqlen - recipe.held_out)
    return recipe if samples < 1 or recipe.natural_length else dataclasses.replace(recipe, samples=samples)


def load_calibration(plan: Plan) -> list[Tensor]:
    """The token sequences of a run, int64 [length] each.

    Raises:
        InputError: the model's tokenizer is missing. QuantizationError: the text is missing, malformed or too short.
    """
    return calibration_data.load(plan.calibration, load_tokenizer(plan.model), plan.recipe)


def rehearse(plan: Plan, observer: Observer) -> Report:
    """A dry run: the memory plan, and one block quantized on one batch of the real text. Nothing is written."""
    return quantize_model(
        plan.model, plan.recipe, load_calibration(plan), Nothing(), observer, device=plan.device, dry_run=True
    )


class Nothing:
    """A writer that keeps nothing."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Forget the tensor."""


def state_dir(plan: Plan) -> Path:
    """Where a run keeps its finished blocks until the checkpoint is complete."""
    return plan.out.with_name(plan.out.name + ".state")


def run(plan: Plan, observer: Observer, *, resume: bool) -> Result | None:
    """Quantize as planned and publish the checkpoint; on any exception nothing appears at ``plan.out``.

    With ``resume``, finished blocks are kept in ``OUT.state`` until the checkpoint is complete. Of several processes
    that ``torchrun`` started the first one publishes; the others return None.
    """
    source = ModelDir(plan.model)
    sequences = load_calibration(plan)
    state = state_dir(plan)
    with ranks.joined(plan.device) as device:
        settings: dict[str, Any] = {"device": device, "state_dir": state if resume else None}
        if ranks.rank() > 0:
            quantize_model(plan.model, plan.recipe, sequences, Nothing(), **settings)
            return None
        with CheckpointWriter(plan.out, source, overwrite=plan.overwrite) as writer:
            report = quantize_model(plan.model, plan.recipe, sequences, writer, observer, **settings)
            writer.finish(report.modules, plan.linears, plan.to_dict())
    shutil.rmtree(state, ignore_errors=True)
    before = sum(file.stat().st_size for file in source.files)
    after = sum(file.stat().st_size for file in plan.out.glob("*.safetensors"))
    try:
        sample, warning = write_sample(plan, sequences[-1]), None
    except Exception as error:
        # The checkpoint is published and whole; what could not be shown does not undo it.
        known = explain(error)
        if known is None:
            raise
        sample, warning = None, f"no sample was generated: {known}"
    return Result(report, before, after, sample, warning)


def write_sample(plan: Plan, sequence: Tensor) -> dict[str, str]:
    """What the finished checkpoint writes, greedily, after the beginning of a calibration sequence.

    Raises:
        TrirunError, NativeError, torch.OutOfMemoryError: the checkpoint cannot be run on this machine.
    """
    from ..backends.registry import open_runner
    from ..engine.engine import Engine
    from ..engine.generation import stop_ids
    from ..engine.request import Request
    from ..engine.sampling import SamplingParams

    tokenizer = load_tokenizer(plan.model)
    engine = Engine(open_runner(plan.out, device=plan.device, slots=1))
    prompt = sequence[:SAMPLE_PROMPT].tolist()
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=0.0)
    request = Request("sample", tuple(prompt), params, frozenset(stop_ids(ModelDir(plan.out))))
    events = list(engine.generate([request]))
    if events[-1].error is not None:
        raise InputError(events[-1].error)
    tokens = [token.id for event in events for token in event.tokens]
    return {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(tokens)}


def with_options(recipe: Recipe, settings: Mapping[str, Any], overrides: list[str]) -> Recipe:
    """The recipe with what was given on the command line in its place.

    Raises:
        UsageError: a value is out of range; the option is named.
    """
    changes = [(f"--{key.replace('_', '-')} {value}", {key: value}) for key, value in settings.items()]
    merged = dict(recipe.overrides)
    for text in overrides:
        pattern, override = parse_override(text)
        # Once more at the end: the last match wins.
        merged.pop(pattern, None)
        merged[pattern] = override
        changes.append((f"--override {text}", {"overrides": dict(merged)}))
    for option, change in changes:
        try:
            recipe = dataclasses.replace(recipe, **change)
        except QuantizationError as error:
            raise UsageError(f"{option}: {str(error).removeprefix('recipe: ')}") from None
    return recipe


def parse_override(text: str) -> tuple[str, Override]:
    """``REGEX=keep``, ``REGEX=g64`` (``g-1``: per output channel) or ``REGEX=GRID`` as a recipe holds it.

    Raises:
        UsageError: there is no ``=``, or what follows it is not known.
    """
    pattern, found, setting = text.rpartition("=")
    if not found or not pattern:
        raise UsageError(f"--override {text}: the form is REGEX=keep, REGEX=g64 or REGEX=zero")
    if setting == "keep":
        return pattern, Override(keep=True)
    if group := re.fullmatch(r"g(-?\d+)", setting):
        return pattern, Override(group_size=int(group[1]))
    return pattern, Override(grid=setting)
