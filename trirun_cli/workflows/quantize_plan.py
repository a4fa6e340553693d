"""The beginning of ``trirun quantize``: options resolved, and all that can be checked before the long part."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trirun_gptq import calibration as calibration_data
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import decoder_blocks, kept_modules
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.recipe import Override, Recipe, load_recipe
from trirun_gptq.run.progress import Event, ProgressCallback, Warned, silent
from trirun_kernels import QuantSpec

from ..backends.device import pick_device
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import CheckpointWriter
from ..errors import InputError, UsageError
from ..resources import configs_dir
from ..text.detokenizer import load_tokenizer
from ..version import __version__
from .settings import given

PRESETS = ("fast", "default", "best")


@dataclass(frozen=True, slots=True)
class QuantizePlan(Event):
    """A run that was checked but not started; the first event of a run.

    Attributes:
        model, out: the two directories. recipe: fully resolved. calibration: where its text comes from.
        device: a torch device. linears: every linear module of the model, name to (n, k).
        blocks: what the names of those inside the decoder blocks begin with; the others are kept.
        kept: modules inside them that hold matrices and cannot be 2 bits wide, name to what each is.
        overwrite: replace a non-empty ``out``.
    """

    model: Path
    out: Path
    recipe: Recipe
    calibration: str
    device: str
    linears: dict[str, tuple[int, int]]
    blocks: str
    kept: dict[str, str]
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
            inside = name.startswith(self.blocks) and name not in self.kept
            grid = self.recipe.choice(name) if inside else None
            if grid is not None:
                yield n, k, grid.spec

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
            "kept": self.kept,
            "recipe": self.recipe.to_dict(),
        }


def plan_quantize(
    model: Path,
    out: Path,
    *,
    preset: str,
    recipe: Recipe | str | Path | None,
    settings: Mapping[str, Any],
    overrides: Iterable[str],
    calibration: str | None,
    device: str,
    overwrite: bool,
    progress: ProgressCallback = silent,
) -> QuantizePlan:
    """Resolve and check everything that can be checked before the long part.

    Args:
        progress: is warned of what the user should know before the run. The others: see
            :func:`~trirun_cli.workflows.quantize.quantize`.

    Raises:
        UsageError, InputError, QuantizationError: an option, the model, the recipe, the text or the output does not
            fit.
    """
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset}: one of {', '.join(PRESETS)}")
    source = ModelDir(model)
    if source.quant_method is not None:
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe or configs_dir() / f"{preset}.yaml")
    recipe = with_options(recipe, settings, overrides)
    if calibration is None:
        calibration = str(configs_dir() / "demo-model" / "calibration.txt")
        wanted = recipe.samples
        if "samples" not in settings:
            recipe = _within_excerpt(recipe, calibration, model)
        fewer = f" ({recipe.samples} sequences, recipe {recipe.name!r} has {wanted})" if recipe.samples < wanted else ""
        message = (
            f"calibrating on the short prose excerpt that ships with trirun{fewer}; "
            "--calibration with text like the model's own use gives a better model"
        )
        progress(Warned(message))
    calibration_data.check_source(calibration)
    # Refuses a non-empty output before the long part.
    CheckpointWriter(out, source, overwrite=overwrite)
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    path, modules = decoder_blocks(skeleton)
    blocks, kept = f"{path}.", {f"{path}.{name}": kind for name, kind in kept_modules(modules).items()}
    inside = [name for name in linears if name.startswith(blocks) and name not in kept]
    for pattern in (*recipe.ignore, *recipe.overrides):
        if not any(re.search(pattern, name) for name in (*inside, *kept)):
            raise UsageError(
                f"{pattern!r} matches none of the {len(inside)} linear layers in the decoder blocks",
                f"their names are like {inside[-1]}" if inside else None,
            )
    grids = {name: grid for name in inside if (grid := recipe.choice(name)) is not None}
    if not grids:
        raise UsageError(
            f"none of the {len(inside)} linear layers in the decoder blocks is left to quantize",
            "fewer patterns of --override REGEX=keep, or of the recipe's ignore",
        )
    for name, grid in grids.items():
        k, group_size = linears[name][1], grid.spec.group_size
        if group_size > 0 and k % group_size:
            fits = next(size for size in (64, 32, -1) if size == -1 or k % size == 0)
            raise UsageError(
                f"{name} has k={k} input features, not a multiple of group size {group_size}",
                f"--group-size {fits}, or for these layers alone: --override '{name.rsplit('.', 1)[-1]}=g{fits}'",
            )
    if kept:
        progress(Warned(f"kept in 16 bits, being no plain linear layers: {_in_words(kept)}"))
    return QuantizePlan(model, out, recipe, calibration, pick_device(device), linears, blocks, kept, overwrite)


def _in_words(kept: Mapping[str, str]) -> str:
    """How many modules, and which, with the number of the layer left out: "2 × model.layers.*.conv (Conv1d [64, 1, 4])"
    for each kind."""
    kinds = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", name), kind) for name, kind in kept.items())
    return ", ".join(f"{count} × {name} ({kind})" for (name, kind), count in kinds.items())


def _within_excerpt(recipe: Recipe, excerpt: str, model: Path) -> Recipe:
    """The recipe with as many samples as the excerpt has of its length, which is a matter of the model's tokenizer."""
    tokens = len(calibration_data.load_stream(excerpt, load_tokenizer(model), recipe.seed))
    samples = min(recipe.samples, tokens // recipe.seqlen - recipe.held_out)
    return recipe if samples < 1 or recipe.natural_length else dataclasses.replace(recipe, samples=samples)


def with_options(recipe: Recipe, settings: Mapping[str, Any], overrides: Iterable[str]) -> Recipe:
    """The recipe with what was given on the command line in its place.

    Args:
        settings: keys of :class:`~trirun_gptq.recipe.Recipe`; None leaves a key as it is.
        overrides: ``REGEX=keep``, ``REGEX=g64``, ``REGEX=zero``, in the order given; the last match wins.

    Raises:
        UsageError: a key is unknown, or a value of another type or out of range; the option is named.
    """
    settings = given(Recipe, settings)
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
