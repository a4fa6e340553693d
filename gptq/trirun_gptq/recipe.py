"""What to do to a model: every choice of a run in one frozen record, read strictly from YAML."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trirun_kernels import QuantSpec

from .errors import QuantizationError
from .patterns import matches
from .recipe_yaml import checked_fields, load_yaml, require, string_list, suggest

# The zero point of each named grid; None is one real zero per group.
GRIDS: dict[str, float | None] = {"signed": 1.0, "midrise": 1.5, "zero": None, "ternary": 1.0}
# Of equal size; each layer takes the one that serves its outputs better.
AUTO = ("signed", "midrise")
_GRID_NAMES = (*GRIDS, "auto")
# How the codes of a block are trained, see :mod:`trirun_gptq.block.trainable`.
METHODS = ("ste", "gumbel")


class Grid(NamedTuple):
    """The values one matrix may take.

    Attributes:
        spec: group size and zero point. ternary: code 3 is left unused.
    """

    spec: QuantSpec
    ternary: bool

    @property
    def levels(self) -> int:
        """How many codes are in use: 4, or 3 for a ternary grid."""
        return 3 if self.ternary else 4


@dataclass(frozen=True, slots=True)
class Override:
    """What differs for the modules one pattern matches. ``keep`` leaves them unquantized."""

    group_size: int | None = None
    grid: str | None = None
    keep: bool = False

    def over(self, group_size: int, grid: str) -> tuple[int, str]:
        """Group size and grid with its own in their place."""
        return group_size if self.group_size is None else self.group_size, grid if self.grid is None else self.grid


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every choice of a quantization run. The defaults are the ``fast`` preset.

    Attributes:
        name: shown to the user and stored with the result.
        wbits: 2; nothing else has kernels.
        group_size: input features per scale: 128, 64, 32, or -1 for one scale per output channel.
        grid: ``signed`` ({-1..2}·s, s of either sign), ``zero`` (one real zero per group), ``midrise`` ({±½, ±1½}·s),
            ``ternary`` ({-1, 0, 1}·s), or ``auto``: signed or midrise, whichever serves a layer better.
        samples, seqlen: calibration sequences and their length in tokens.
        natural_length: one sequence per document, as long as the document is, up to seqlen.
        held_out: sequences beside those that only decide what is kept.
        seed: of every random choice.
        damp: dampening, as a fraction of mean(diag H).
        clip: search each group's scale for the least error weighted by 1/U²; off takes the extreme value.
        act_order: columns in the order of descending diag(H), on static groups.
        sweeps: coordinate-descent passes over the final codes.
        refit: closed-form least-squares scales for the final codes.
        correction: strength in 0..1 of the correction of the target for the error of the layers before; 0 is off.
        sequential: quantize a block's layers in stages (q|k|v, o, gate|up, down), each seeing the ones before it
            quantized; off collects all Hessians in one pass.
        refine_steps: optimizer steps of block refinement, about 4096 tokens each; 0 is off.
        engines: the methods by which codes are trained: ``ste`` (a latent weight, straight-through; Bengio et al.
            2013), ``gumbel`` (a distribution over the four codes; Jang et al. 2017). With both, each block is trained
            by either, and the better result is kept.
        refine_lr: Adam's peak learning rate of the latent codes, in steps of the grid. refine_scale_lr: of the scales,
            as a fraction of them.
        e2e_steps: optimizer steps of end-to-end training afterwards, about 4096 tokens each: all scales of the model
            against the original's predictions; 0 is off. e2e_lr: its peak learning rate, as a fraction of the scales.
        e2e_code_steps: then as many of the codes and scales together; 0 is off. e2e_code_lr: peak rate of both, in
            steps of the grid and as a fraction. Latents, gradients and moments of the whole model must fit the device;
            where they do not, this is left out, with a warning.
        e2e_ce: weight of the text's own cross entropy beside the divergence, in 0..1.
        ignore: patterns (``re.search`` on the module path) of modules to leave as they are.
        overrides: pattern → :class:`Override`; the last match wins.

    Raises:
        QuantizationError: a value is out of range; the message names the key.
    """

    name: str = "fast"
    wbits: int = 2
    group_size: int = 128
    grid: str = "auto"
    samples: int = 128
    seqlen: int = 512
    natural_length: bool = False
    held_out: int = 8
    seed: int = 0
    damp: float = 0.05
    clip: bool = True
    act_order: bool = True
    sweeps: int = 2
    refit: bool = True
    correction: float = 0.5
    sequential: bool = True
    refine_steps: int = 0
    refine_lr: float = 2e-3
    refine_scale_lr: float = 1e-3
    engines: tuple[str, ...] = ("ste",)
    e2e_steps: int = 0
    e2e_lr: float = 1e-2
    e2e_code_steps: int = 0
    e2e_code_lr: float = 5e-3
    e2e_ce: float = 0.0
    ignore: tuple[str, ...] = ()
    overrides: Mapping[str, Override] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.wbits == 2, f"wbits={self.wbits}: only 2 is supported")
        require(self.grid in _GRID_NAMES, suggest("grid", self.grid, _GRID_NAMES))
        _grids(self.group_size, self.grid)
        least_values = {"samples": 1, "seqlen": 2}
        least_values |= dict.fromkeys(("held_out", "sweeps", "refine_steps", "e2e_steps", "e2e_code_steps"), 0)
        for key, least in least_values.items():
            value = getattr(self, key)
            require(value >= least, f"{key}={value}: at least {least} is needed")
        require(0 < self.damp <= 1, f"damp={self.damp}: a fraction in (0, 1] is needed")
        require(0 <= self.correction <= 1, f"correction={self.correction}: a strength in [0, 1] is needed")
        require(0 <= self.e2e_ce <= 1, f"e2e_ce={self.e2e_ce}: a weight in [0, 1] is needed")
        for key in ("refine_lr", "refine_scale_lr", "e2e_lr", "e2e_code_lr"):
            value = getattr(self, key)
            require(math.isfinite(value) and value >= 0, f"{key}={value}: a number of at least 0 is needed")
        require(len(self.engines) > 0, f"engines is empty; known: {', '.join(METHODS)}")
        for method in self.engines:
            require(method in METHODS, f"engines: {suggest('method', method, METHODS)}")
        for key in ("refine_steps", "correction", "e2e_steps", "e2e_code_steps"):
            decided = getattr(self, key) == 0 or self.held_out > 0
            require(decided, f"{key} needs held_out > 0: held-out sequences decide what is kept")
        for pattern in (*self.ignore, *self.overrides):
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise QuantizationError(f"recipe: {pattern!r} is not a regular expression: {error}") from None
        for pattern, override in self.overrides.items():
            group_size, grid = override.over(self.group_size, self.grid)
            require(grid in _GRID_NAMES, f"overrides[{pattern!r}]: {suggest('grid', grid, _GRID_NAMES)}")
            _grids(group_size, grid)

    @property
    def end_to_end(self) -> bool:
        """Whether the whole model is trained after its blocks."""
        return self.e2e_steps > 0 or self.e2e_code_steps > 0

    def without_end_to_end(self) -> Recipe:
        """The same for the blocks alone: with the defaults of all that concerns end-to-end training."""
        theirs: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name.startswith("e2e_")}
        return dataclasses.replace(self, **theirs)

    def choice(self, module: str) -> Grid | None:
        """The first of a module's candidates; None when it is left as it is."""
        candidates = self.candidates(module)
        return candidates[0] if candidates else None

    def candidates(self, module: str) -> tuple[Grid, ...]:
        """The grids one module may take; empty when the module is left as it is.

        Args:
            module: its path in the model.
        """
        if any(matches(pattern, module) for pattern in self.ignore):
            return ()
        group_size, grid, keep = self.group_size, self.grid, False
        for pattern, override in self.overrides.items():
            if matches(pattern, module):
                group_size, grid = override.over(group_size, grid)
                keep = override.keep
        return () if keep else _grids(group_size, grid)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as :meth:`from_dict` reads them: what is written beside the result."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["ignore"], values["engines"] = list(self.ignore), list(self.engines)
        values["overrides"] = {
            pattern: {key: value for key, value in dataclasses.asdict(override).items() if value not in (None, False)}
            for pattern, override in self.overrides.items()
        }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values.

        Raises:
            QuantizationError: an unknown key (with the nearest known one), or a value of the wrong type or range.
        """
        known = checked_fields(cls, values, "recipe")
        overrides = known.pop("overrides", {})
        require(isinstance(overrides, Mapping), f"overrides must map patterns to settings, got {overrides!r}")
        parsed = {}
        for pattern, entry in overrides.items():
            require(isinstance(entry, Mapping), f"overrides[{pattern!r}] must be a mapping, got {entry!r}")
            parsed[str(pattern)] = Override(**checked_fields(Override, entry, f"recipe: overrides[{pattern!r}]"))
        for key in ("ignore", "engines"):
            if key in known:
                known[key] = string_list(key, known[key])
        return cls(**known, overrides=parsed)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file, of one's own or a ``trirun_recipe.yaml``; keys left out keep the defaults of
    :class:`Recipe`.

    Raises:
        QuantizationError: the file is missing, is not YAML, or has an unknown key or a bad value.
    """
    return load_yaml(path, "quantize", Recipe.from_dict)


def _grids(group_size: int, grid: str) -> tuple[Grid, ...]:
    names = AUTO if grid == "auto" else (grid,)
    try:
        return tuple(Grid(QuantSpec(group_size, GRIDS[name]), name == "ternary") for name in names)
    except ValueError as error:
        raise QuantizationError(f"recipe: {error}") from None
