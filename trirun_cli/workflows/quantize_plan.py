"""The beginning of ``trirun quantize``: options resolved, and all that can be checked before the long part."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from trirun_gptq import calibration as calibration_data
from trirun_gptq.errors import QuantizationError
from trirun_gptq.model.loader import decoder_blocks, kept_modules, kind_of
from trirun_gptq.model.meta import linear_modules, meta_model
from trirun_gptq.model.mxfp4 import QUANT_METHOD as MXFP4
from trirun_gptq.patterns import matches
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
from .output import in_all_layers, in_words, matrix_kinds, model_origin, text_origin
from .settings import given

PRESETS = ("fast", "default", "best")


@dataclass(frozen=True, slots=True)
class QuantizePlan(Event):
    """A run that was checked but not started; the first event of a run.

    Attributes:
        model, out: the two directories. recipe: fully resolved. calibration: where its text comes from.
        device: a torch device. linears: every linear module of the model, name to (n, k).
        blocks: what the names of those inside the decoder blocks begin with; the others are kept.
        block_count: how many decoder blocks there are.
        kept: modules inside them that hold matrices and cannot be 2 bits wide, name to what each is.
        asked: modules that hold matrices and stay as they are because the recipe says so, in the same form.
        overwrite: replace a non-empty ``out``.
        fewer: take what there is of a text that is too short for the recipe; False where samples were asked for.
    """

    model: Path
    out: Path
    recipe: Recipe
    calibration: str
    device: str
    linears: dict[str, tuple[int, int]]
    blocks: str
    block_count: int
    kept: dict[str, str]
    asked: dict[str, str]
    overwrite: bool
    fewer: bool = True

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
        """Plain values for JSON."""
        return {
            "trirun": __version__,
            "command": "quantize",
            "model": str(self.model),
            "calibration": self.calibration,
            "device": self.device,
            "weights": self.weights,
            "packed_bytes": self.packed_bytes,
            "kept": self.kept | self.asked,
            "recipe": self.recipe.to_dict(),
        }

    def to_recipe(self) -> dict[str, Any]:
        """Plain values for the recipe file, which is published with the checkpoint: names and hashes, no paths."""
        origins = {"model": model_origin(self.model), "calibration": text_origin(self.calibration)}
        return self.to_dict() | origins


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
    end_to_end: bool = True,
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
    if source.quant_method not in (None, MXFP4):
        raise InputError(f"{model} is quantized already (quant_method {source.quant_method!r})")
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe or configs_dir() / f"{preset}.yaml")
    recipe = with_options(recipe, settings, overrides)
    if not end_to_end:
        recipe = recipe.without_end_to_end()
    fewer = settings.get("samples") is None
    if calibration is None:
        calibration = str(configs_dir() / "demo-model" / "calibration.txt")
        wanted = recipe.samples
        if fewer:
            recipe = _within_excerpt(recipe, calibration, model)
        found = f" ({recipe.samples} sequences, recipe {recipe.name!r} has {wanted})" if recipe.samples < wanted else ""
        message = (
            f"calibrating on the short prose excerpt that ships with trirun{found}; "
            "--calibration with text like the model's own use gives a better model"
        )
        progress(Warned(message))
    calibration_data.check_source(calibration)
    # Refuses a non-empty output before the long part.
    CheckpointWriter(out, source, overwrite=overwrite)
    skeleton = meta_model(source.path)
    linears = linear_modules(skeleton)
    blocks_name, block_list = decoder_blocks(skeleton)
    blocks = f"{blocks_name}."
    kept = {f"{blocks}{name}": kind for name, kind in kept_modules(block_list).items()}
    inside = [name for name in linears if name.startswith(blocks) and name not in kept]
    if not inside:
        raise InputError(f"{model} has no linear layer in its decoder blocks{matrix_kinds(block_list)}")
    _require_matches(recipe, inside, {name: kind_of(module) for name, module in skeleton.named_modules() if name})
    grids = {name: grid for name in inside if (grid := recipe.choice(name)) is not None}
    if not grids:
        raise UsageError(
            f"none of the {len(inside)} linear layers in the decoder blocks is left to quantize",
            "fewer patterns of --override REGEX=keep, or of the recipe's ignore",
        )
    _require_group_sizes({name: (linears[name][1], grid.spec.group_size) for name, grid in grids.items()})
    matrices = kept_modules(skeleton) | {name: kind_of(skeleton.get_submodule(name)) for name in linears}
    asked = {name: kind for name, kind in matrices.items() if not recipe.candidates(name)}
    if unasked := {name: kind for name, kind in kept.items() if name not in asked}:
        progress(Warned(f"kept in 16 bits, as 2 bits do not fit them: {in_words(unasked)}"))
    target, count = pick_device(device), len(block_list)
    return QuantizePlan(model, out, recipe, calibration, target, linears, blocks, count, kept, asked, overwrite, fewer)


def _require_matches(recipe: Recipe, inside: Collection[str], modules: dict[str, str]) -> None:
    """Refuse a pattern that matches nothing, or that chooses a grid or a group size where none can be.

    Args:
        inside: the layers that can be quantized. modules: all of the model, name to what each is, "" of one that has no
            parameters of its own. To keep one that is kept anyway is no mistake.
    """
    keeps = {pattern for pattern, override in recipe.overrides.items() if override.keep} | {*recipe.ignore}
    for pattern in (*recipe.ignore, *recipe.overrides):
        if any(matches(pattern, name) for name in inside):
            continue
        other = next((name for name, kind in modules.items() if kind and matches(pattern, name)), None)
        if other is None:
            names = {in_all_layers(name): name for name, kind in reversed(modules.items()) if kind}
            raise UsageError(
                f"{pattern!r} matches none of the model's modules",
                f"the name most like it is {_nearest(pattern, names.values())}",
            )
        if pattern not in keeps:
            raise UsageError(
                f"{pattern!r} matches no layer that is quantized: {other} ({modules[other]}) stays in 16 bits",
                f"quantized are the {len(inside)} linear layers in the decoder blocks, such as {next(iter(inside))}",
            )


def _nearest(pattern: str, names: Iterable[str]) -> str:
    return max(names, key=lambda name: SequenceMatcher(None, pattern, name).ratio())


def _require_group_sizes(layers: Mapping[str, tuple[int, int]]) -> None:
    """Refuse layers (name to k and group size) whose k is no multiple of their group size: all of them at once, those
    of one kind in all blocks as one, with what fits each."""
    kinds: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for name, (k, group_size) in layers.items():
        if group_size > 0 and k % group_size:
            kinds[name.rsplit(".", 1)[-1], k, group_size].append(name)
    if not kinds:
        return
    fits = {kind: next(size for size in (128, 64, 32, -1) if size == -1 or kind[1] % size == 0) for kind in kinds}
    told = [
        f"{names[0]}{f' and {len(names) - 1} more {leaf}' if names[1:] else ''} "
        f"{'have' if names[1:] else 'has'} k={k} input features, not a multiple of group size {group_size}"
        for (leaf, k, group_size), names in kinds.items()
    ]
    smallest = -1 if -1 in fits.values() else min(fits.values())
    overrides = dict.fromkeys(f"--override '{leaf}=g{size}'" for (leaf, _, _), size in fits.items())
    raise UsageError("; ".join(told), f"--group-size {smallest}, or for these layers alone: {' '.join(overrides)}")


def _within_excerpt(recipe: Recipe, excerpt: str, model: Path) -> Recipe:
    """The recipe with as many samples as the excerpt has of its length, which is a matter of the model's tokenizer."""
    tokens = len(calibration_data.load_stream(excerpt, load_tokenizer(model), recipe.seed))
    return recipe if recipe.natural_length else calibration_data.within(recipe, tokens // recipe.seqlen)


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
