"""Every choice of a training run in one frozen record, read strictly from YAML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe import GRIDS, Recipe
from ..recipe_yaml import checked_fields, load_yaml, require, string_list, suggest

METHODS = ("learned", "absmean")
INITS = ("gptq", "nearest")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """How a model is trained on its grid. The defaults are ``configs/finetune-learned.yaml``.

    Attributes:
        name: shown to the user and stored with the result.
        method: ``learned``: one trained scale per group, codes by rounding (LSQ, Esser et al. 2020). ``absmean``: one
            scale per matrix, the mean magnitude of its latent weights, ternary (BitNet b1.58, Ma et al. 2024; TriLM,
            Kaushal et al. 2024).
        grid, group_size: as in :class:`~trirun_gptq.recipe.Recipe`, but for ``auto``; ``absmean`` has the ternary grid
            and group size -1.
        init: where ``learned`` begins: ``gptq`` (the ``fast`` preset on ``init_samples`` sequences), ``nearest``
            (rounding, with searched scales), or the directory of a packed checkpoint of the same model, whose grid
            then counts. ``absmean`` begins at the original weights and ignores it.
        init_samples: calibration sequences of the ``gptq`` beginning.
        activation_bits: 16, or 8 to train with int8 activations per token, as BitNet b1.58 does.
        steps: optimizer steps. minutes: of the whole run, from its start to the checked checkpoint, over all sittings;
            they take the place of ``steps`` where they are not 0, and such a run ends elsewhere each time.
        batch: sequences per step over all devices. micro_batch: sequences in memory at a time on each device; 0 is all
            of them.
        seqlen: tokens per sequence.
        generated: sequences sampled from the original model as further training text; 0 is none.
        text_share: fraction of every batch that is real text where there are generated sequences.
        prompt: tokens of real text that each generated sequence begins with.
        kl: weight of KL(original ‖ trained). ce: weight of the cross-entropy with the text.
        lr: Adam's peak learning rate of latent weights, in steps of the grid. scale_lr: of scales, as a fraction of
            them. rest_lr: of everything else (norms, embeddings, biases); 0 leaves it untouched.
        warmup: fraction of the run over which rates rise. final_lr: fraction of the peak at which the cosine ends.
        clip: largest norm of the gradient.
        precision: ``auto`` (bf16 where the device has it, else fp32), ``bf16``, ``fp16`` (with loss scaling), ``fp32``.
            Latent weights, scales and optimizer state are float32 always.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        held_out: sequences of the text that only decide which state is kept. evaluations: times per run.
        seed: of every random choice.
        ignore: patterns (``re.search`` on the module path) of linear layers that stay as they are.

    Raises:
        QuantizationError: a value is out of range; the message names the key.
    """

    name: str = "learned"
    method: str = "learned"
    grid: str = "ternary"
    group_size: int = 128
    init: str = "gptq"
    init_samples: int = 128
    activation_bits: int = 16
    steps: int = 2000
    minutes: float = 0.0
    batch: int = 32
    micro_batch: int = 0
    seqlen: int = 512
    generated: int = 0
    text_share: float = 0.5
    prompt: int = 8
    kl: float = 1.0
    ce: float = 0.0
    lr: float = 1e-2
    scale_lr: float = 2e-3
    rest_lr: float = 5e-4
    warmup: float = 0.05
    final_lr: float = 0.02
    clip: float = 1.0
    precision: str = "auto"
    gradient_checkpointing: bool = False
    held_out: int = 32
    evaluations: int = 20
    seed: int = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.method in METHODS, suggest("method", self.method, METHODS))
        require(self.precision in PRECISIONS, suggest("precision", self.precision, PRECISIONS))
        require(self.activation_bits in (8, 16), f"activation_bits={self.activation_bits}: 8 or 16")
        require(self.grid in GRIDS, suggest("grid", self.grid, GRIDS))
        # Checks group size and patterns.
        self.quantization()
        if self.method == "absmean":
            fits = self.grid == "ternary" and self.group_size == -1
            require(fits, "method absmean is ternary with one scale per matrix: grid: ternary, group_size: -1")
        for key, least in (
            ("init_samples", 1),
            ("steps", 1),
            ("batch", 1),
            ("micro_batch", 0),
            ("seqlen", 2),
            ("generated", 0),
            ("prompt", 1),
            ("held_out", 1),
            ("evaluations", 1),
        ):
            value = getattr(self, key)
            require(value >= least, f"{key}={value}: at least {least} is needed")
        for key in ("minutes", "kl", "ce", "lr", "scale_lr", "rest_lr"):
            value = getattr(self, key)
            require(math.isfinite(value) and value >= 0, f"{key}={value}: a number of at least 0 is needed")
        for key in ("text_share", "warmup", "final_lr"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"{key}={value}: a fraction in [0, 1] is needed")
        require(self.kl + self.ce > 0, "kl and ce are both 0: there is nothing to train towards")
        require(self.clip > 0, f"clip={self.clip}: a number above 0 is needed")
        require(self.prompt < self.seqlen, f"prompt={self.prompt} leaves nothing to generate of seqlen={self.seqlen}")
        parts = f"micro_batch={self.micro_batch} does not divide batch={self.batch}"
        require(self.micro_batch == 0 or self.batch % self.micro_batch == 0, parts)

    def quantization(self) -> Recipe:
        """The recipe of the ``gptq`` beginning, which also says which module has which grid."""
        return Recipe(
            grid=self.grid,
            group_size=self.group_size,
            samples=self.init_samples,
            seqlen=self.seqlen,
            seed=self.seed,
            ignore=self.ignore,
        )

    def rate(self, done: float) -> float:
        """The learning rates when a fraction ``done`` of the run is over, as a fraction of their peaks: a linear rise,
        then a cosine."""
        if done < self.warmup:
            return done / self.warmup
        falling = (done - self.warmup) / (1 - self.warmup) if self.warmup < 1 else 1.0
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * falling))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as :meth:`from_dict` reads them."""
        return dataclasses.asdict(self) | {"ignore": list(self.ignore)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainRecipe:
        """A recipe from plain values.

        Raises:
            QuantizationError: an unknown key (with the nearest known one), or a value of the wrong type or range.
        """
        known = checked_fields(cls, values, "recipe")
        if "ignore" in known:
            known["ignore"] = string_list("ignore", known["ignore"])
        return cls(**known)


def load_train_recipe(path: str | Path) -> TrainRecipe:
    """Read a recipe from a YAML file, of one's own or a ``trirun_recipe.yaml``; keys left out keep the defaults of
    :class:`TrainRecipe`.

    Raises:
        QuantizationError: the file is missing, is not YAML, or has an unknown key or a bad value.
    """
    return load_yaml(path, "finetune", TrainRecipe.from_dict)
