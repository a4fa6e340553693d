"""Which models the native decoder runs, and what they are made of, read from config.json."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from trirun_kernels.weights.names import SCALE

from ..errors import InputError
from .families import FAMILIES, FLAT_TEXT
from .gemma4 import GEMMA4
from .hybrids import HYBRIDS
from .mixtures import MIXTURES
from .parts import Description, TensorNames, UnsupportedModel
from .settings import OPTIONAL_COUNTS, check_numbers, check_sizes, text_settings

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import DecoderShape

__all__ = ["Description", "TensorNames", "UnsupportedModel"]

GPU_DTYPES = ("float16", "bfloat16")
# Longer contexts are for the asking; a cache of this length is at hand without a thought.
DEFAULT_CONTEXT = 8192
# What the decoder's tensors begin with, and the output head's, in models that see or hear too.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.")


def description(config: dict[str, Any]) -> Description:
    """What a model is made of, from its config.json; of a model that also sees, its language model.

    Raises:
        UnsupportedModel: the model is of another family, or uses something that the native decoder does not have.
        InputError: a size is missing or is none.
    """
    config = text_settings(config)
    family = config.get("model_type")
    family = FLAT_TEXT.get(family, family) if isinstance(family, str) else family
    known = FAMILIES | HYBRIDS | MIXTURES | GEMMA4
    if not isinstance(family, str) or family not in known:
        raise UnsupportedModel(f"the native decoder does not run models of the family {family}")
    make, defaults = known[family]
    config = defaults | config
    check_sizes(config)
    try:
        return make(config)
    except UnsupportedModel:
        raise
    # Settings have many kinds, and each is used where it is read.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise InputError(f"config.json: a setting of its {family} is of a kind that no model has ({kind})") from error


def decoder_shape(config: dict[str, Any]) -> DecoderShape:
    """The parts of :func:`description`, with the same errors."""
    return description(config).shape


def gpu_decoder_shape(config: dict[str, Any]) -> DecoderShape:
    """:func:`decoder_shape` of a model that the native decoder runs on a GPU too.

    Raises:
        UnsupportedModel, InputError: as there; or its kernels do not take these sizes.
    """
    from trirun_kernels.decoder.shape import Attention, mixer_runs

    shape = decoder_shape(config)
    for layer in shape.layers:
        ffn, mixer = layer.feed_forward.size, layer.mixer
        if layer.mixture is not None and layer.mixture.size % 16:
            raise UnsupportedModel(f"experts of size {layer.mixture.size}")
        if ffn % 16 or not mixer_runs(mixer):
            heads = f"head size {mixer.head_dim}" if isinstance(mixer, Attention) else str(mixer)
            raise UnsupportedModel(f"feed-forward size {ffn} and {heads}")
    return shape


def gpu_dtype(config: dict[str, Any], dtype: str) -> str:
    """What the native decoder computes a model in on a GPU, "float16" or "bfloat16": the --dtype that is given, or with
    "auto" the checkpoint's own, float16 for one in float32.

    Raises:
        UnsupportedModel: it is not one of 16 bits.
    """
    if dtype == "auto":
        config = text_settings(config)
        own = str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch.")
        dtype = own if own in GPU_DTYPES else "float16"
    if dtype not in GPU_DTYPES:
        raise UnsupportedModel(f"the native decoder computes in float16 or bfloat16 on a GPU, not {dtype}")
    return dtype


def longest_context(config: dict[str, Any]) -> int:
    """Positions that a model can have, with the errors of :func:`description`."""
    check_numbers(text_settings(config), OPTIONAL_COUNTS, int)
    return description(config).longest


def chosen_context(config: dict[str, Any], asked: int | None) -> int:
    """The positions of a sequence: those asked for, or the model's own, at most :data:`DEFAULT_CONTEXT`.

    Raises:
        UnsupportedModel: the model does not have as many.
    """
    longest = longest_context(config)
    if asked is not None and asked > longest:
        raise UnsupportedModel(f"a context of {asked} positions; the model has {longest}")
    return min(longest, DEFAULT_CONTEXT) if asked is None else asked


def tensor_prefix(names: Container[str]) -> str:
    """What the names of the decoder's tensors begin with, among those of a checkpoint: mostly "model."."""
    return next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names), _PREFIXES[0])


def module_prefix(names: Container[str], within: str) -> str:
    """The same of packed modules, which have transformers' names whatever those of the other tensors are; ``within``:
    one of a layer's modules."""
    packed = (prefix for prefix in _PREFIXES if f"{prefix}layers.0.{within}{SCALE}" in names)
    return next(packed, tensor_prefix(names))
