"""The original model as teacher, and a copy of it whose decoder layers are trained on their grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import with_linear_layers

from ..errors import QuantizationError
from ..layer.quantized import Quantized
from ..model.loader import TensorSource, decoder_blocks, text_decoder
from ..model.meta import auto_class
from ..run.quiet_hub import quiet_transformers
from .layers import AbsmeanLinear, LearnedLinear, TrainedLinear
from .losses import IGNORED, Terms, distillation, terms
from .recipe import TrainRecipe
from .start import Grids

CHECKED = 64  # tokens on which the split into decoder and head is checked


class Student:
    """A causal language model with :class:`~.layers.TrainedLinear` in its decoder blocks.

    Attributes:
        model: the transformers model, float32; every parameter that is to be trained requires a gradient.
        layers: its trained layers by module name.

    Args:
        grids: which linear layers are trained and on which grid, see :mod:`.start`.
    """

    model: Any
    layers: dict[str, TrainedLinear]

    def __init__(self, model: Any, recipe: TrainRecipe, grids: Grids) -> None:
        self.model, self.layers = with_linear_layers(model), {}
        model.requires_grad_(False)
        # What sees or hears beside the language model has no part in the loss.
        for part in (text_decoder(model), model.get_output_embeddings()):
            part.requires_grad_(recipe.rest_lr > 0)
        for name, grid in grids.items():
            layer = model.get_submodule(name)
            if recipe.method == "absmean":
                self.layers[name] = AbsmeanLinear(layer, recipe.activation_bits)
            else:
                self.layers[name] = LearnedLinear(layer, recipe.activation_bits, grid.spec, grid.levels)
            model.set_submodule(name, self.layers[name])

    def begin(self, source: TensorSource, start: dict[str, Quantized]) -> None:
        """Every layer at its start: ``start[name]`` for learned ones, the original weight for absmean ones."""
        for name, layer in self.layers.items():
            original = source.read(f"{name}.weight").float()
            if isinstance(layer, LearnedLinear):
                layer.begin(start[name], original)
            elif isinstance(layer, AbsmeanLinear):
                layer.begin(original)

    def groups(self, recipe: TrainRecipe) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer, each with the peak of its learning rate."""
        latents = {id(layer.latent) for layer in self.layers.values()}
        learned = [layer for layer in self.layers.values() if isinstance(layer, LearnedLinear)]
        scales = {id(p) for layer in learned for p in (layer.multiplier, layer.zeros) if p.requires_grad}
        parts: dict[float | str, list[nn.Parameter]] = {"lr": [], "scale_lr": [], "rest_lr": []}
        for parameter in self.trained().values():
            kind = "lr" if id(parameter) in latents else "scale_lr" if id(parameter) in scales else "rest_lr"
            parts[kind].append(parameter)
        return [{"params": part, "peak": getattr(recipe, str(kind))} for kind, part in parts.items() if part]

    def trained(self) -> dict[str, nn.Parameter]:
        """Every parameter that is trained, by name; shared ones once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """What a state file must hold to rebuild the present weights: trained parameters and scale bases."""
        bases = {f"{name}.base": layer.base for name, layer in self.layers.items()}
        return {name: p.detach() for name, p in self.trained().items()} | bases

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Set what :meth:`state` returned.

        Raises:
            QuantizationError: it is of another model; the first difference is named.
        """
        present = self.state()
        odd = sorted(present.keys() ^ state.keys())
        if odd:
            raise QuantizationError(f"the saved state and the model differ in {odd[0]}")
        for name, value in present.items():
            if value.shape != state[name].shape:
                raise QuantizationError(f"{name} is {list(value.shape)}, in the saved state {list(state[name].shape)}")
            value.copy_(state[name])


class Distiller(nn.Module):
    """Both models in one module, tokens in, loss out: what several devices run side by side.

    Args:
        student, teacher: transformers models; the teacher is frozen. kl, ce: see :class:`~.recipe.TrainRecipe`.
        dtype: of matrix products; the student's other arithmetic stays float32 under autocast.
        compiled: fuse blocks and loss with ``torch.compile``.
    """

    def __init__(self, student: Any, teacher: Any, recipe: TrainRecipe, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        self.student = student
        # Hidden from parameters() and from the synchronization between devices: it never changes.
        self._teacher = [teacher.requires_grad_(False).eval()]
        self._kl, self._ce, self.dtype, self.compiled = recipe.kl, recipe.ce, dtype, compiled
        self._terms: Terms = terms
        if compiled:
            for model in (student, teacher):
                for block in decoder_blocks(model)[1]:
                    block.compile(dynamic=False)
            self._terms = torch.compile(terms, dynamic=False)

    @property
    def teacher(self) -> Any:
        """The original model, frozen."""
        return self._teacher[0]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [b, t] → the weighted loss summed over them, and [Σ KL, Σ CE], float32 [2], in nats."""
        device = tokens.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            original = hidden_states(self.teacher, tokens)
        # Without gradients the blocks would be compiled once more.
        grad = torch.is_grad_enabled() or self.compiled
        with torch.set_grad_enabled(grad), torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            mine = hidden_states(self.student, tokens)
        labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), 1)
        return distillation(
            mine.flatten(0, 1),
            self.student.get_output_embeddings().weight,
            original.flatten(0, 1),
            self.teacher.get_output_embeddings().weight,
            labels.flatten(),
            kl=self._kl,
            ce=self._ce,
            dtype=self.dtype,
            piece_terms=self._terms,
        )


def hidden_states(model: Any, tokens: Tensor) -> Tensor:
    """What the output head reads: [b, t, h] for tokens int64 [b, t]."""
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state


def load_model(model_dir: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """The causal language model of a directory, without dropout. dtype "auto" is the stored one.

    Raises:
        QuantizationError: transformers cannot load it, or would fill a tensor that is missing with random numbers.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir)
        # Distillation regularizes by itself, and a step without chance can be repeated exactly.
        for key in [key for key in vars(config) if "dropout" in key or key.endswith("pdrop")]:
            setattr(config, key, 0.0)
        with quiet_transformers():
            loaded: Any = auto_class(config).from_pretrained(
                model_dir, config=config, dtype=dtype, output_loading_info=True
            )
    except (ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise QuantizationError(f"{model_dir} cannot be loaded as a causal language model: {reason[:300]}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise QuantizationError(f"{model_dir}: tensor {missing[0]} is missing")
    return model.to(device).eval()


@torch.no_grad()
def require_plain_head(model: Any) -> None:
    """Check that logits are hidden states times a matrix, which the loss is built on.

    Raises:
        QuantizationError: the head has a bias, or the model scales, caps or shifts its logits.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise QuantizationError(f"{name}: the output head is not a linear layer without bias, which training needs")
    tokens = torch.arange(CHECKED, device=head.weight.device).unsqueeze(0) % head.out_features
    expected = model(input_ids=tokens, use_cache=False).logits.float()
    found = head(hidden_states(model, tokens)).float()
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise QuantizationError(f"{name} scales or caps its logits after the output head, which is not supported")


@torch.no_grad()
def held_out_loss(distiller: Distiller, windows: Tensor, batch: int, *, compiled: bool) -> tuple[float, float]:
    """Mean KL per token and mean cross-entropy per predicted token, in nats, of windows int64 [w, t].

    At most ``batch`` windows run at a time, always equally many. Where blocks are ``compiled``, exactly so many if that
    can be had by running all of them up to four times: another shape would be compiled again, for far longer.
    """
    copies = range(1, 5) if compiled else range(1, 2)
    times = next((times for times in copies if times * len(windows) % batch == 0), 1)
    windows = windows.repeat(times, 1)
    size = max(size for size in range(1, batch + 1) if len(windows) % size == 0)
    sums = torch.stack([distiller(part)[1].double().cpu() for part in windows.split(size)]).sum(0)
    return float(sums[0]) / windows.numel(), float(sums[1]) / (windows.numel() - len(windows))
