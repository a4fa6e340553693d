"""llama.cpp's model of a packed checkpoint, and whether it computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trirun_kernels.decoder.shape import Attention

from ...checkpoint.formats.gguf.targets import Target, shared_layer, target_of
from ...checkpoint.reader import Checkpoint
from ...errors import InputError
from ...models.description import Description, UnsupportedModel, description

_ACTIVATIONS = {"silu": "SiLU", "relu2": "ReLU²", "gelu_tanh": "GELU", "clipped_swiglu": "clipped SwiGLU"}


def gguf_model(checkpoint: Checkpoint) -> tuple[Target, Description]:
    """llama.cpp's model of a checkpoint, and what the checkpoint's is made of.

    Raises:
        InputError: llama.cpp has none, or one that computes something else.
    """
    config = checkpoint.config
    family, layers = config.get("model_type"), config.get("num_hidden_layers")
    target = target_of(family, layers) if isinstance(family, str) and isinstance(layers, int) else None
    if target is None:
        raise InputError(f"{checkpoint.path}: llama.cpp's model for {family!r} is not written by trirun")
    try:
        found = description(config)
    except UnsupportedModel as error:
        raise InputError(f"{checkpoint.path}: {error}") from None
    if difference := next(_differences(target, found, config), None):
        raise InputError(f"{checkpoint.path}: llama.cpp's {target.architecture} {difference}")
    return target, found


def gguf_notes(checkpoint: Checkpoint) -> list[str]:
    """What llama.cpp's model does differently, though it is written; with the errors of :func:`gguf_model`."""
    _, found = gguf_model(checkpoint)
    if not rounds_ramp(found):
        return []
    return ["llama.cpp rounds the bounds of yarn's ramp, the model does not: far positions turn by other angles"]


def attentions_of(found: Description) -> tuple[Attention, Attention]:
    """The first mixer that sees everything and the first with a window, where of either kind some rotate; else one
    mixer twice."""
    every = found.shape.attentions
    turned = [each for each in every if each.rotary is not None] or every
    whole = next((each for each in turned if each.window is None), turned[0])
    return whole, next((each for each in turned if each.window is not None), whole)


def rotary_of(found: Description) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary settings of :func:`attentions_of`."""
    whole, slid = attentions_of(found)
    return found.rotary[whole.rotary or 0], found.rotary[slid.rotary or 0]


def rounds_ramp(found: Description) -> bool:
    """Whether llama.cpp rounds the bounds of yarn's ramp where the model does not."""
    whole, _ = rotary_of(found)
    return whole["rope_type"] == "yarn" and not whole.get("truncate", True)


def _differences(target: Target, found: Description, config: Mapping[str, Any]) -> Iterator[str]:
    """What llama.cpp's model does that the checkpoint's does not, or the reverse."""
    shape, layers = found.shape, found.shape.layers
    if not shape.attentions:
        yield "has layers of attention, the model none"
        return
    if any(each.key_dim != each.value_dim for each in shape.deltas):
        yield "has keys and values of one size in its layers of linear attention"
    mixer, activation = attentions_of(found)[0], (layers[0].mixture or layers[0].feed_forward).activation
    if activation != target.activation:
        theirs, ours = _ACTIVATIONS[target.activation], _ACTIVATIONS.get(activation)
        yield f"computes {theirs} where the model has {ours or activation}"
    if target.windows == "must" and not any(shape.windows):
        yield "has layers with a window, the model none"
    turned = [each.rotary is not None for each in shape.attentions]
    every = {
        "all": [True] * len(turned),
        "window": [each.window is not None for each in shape.attentions],
        "fourth": [(index + 1) % 4 != 0 for index in range(len(turned))],
    }
    if turned != every[target.turned]:
        yield "turns queries and keys in other layers than the model"
    yield from _rotary_differences(target, found)
    wide = len(layers) == target.wide_layers
    factor = target.attention_scale or (shape.hidden / mixer.heads if wide else mixer.head_dim) ** -0.5
    if not target.scales and not _close(mixer.scale, factor):
        yield f"multiplies scores by {factor:.4g}, the model by {mixer.scale:.4g}"
    embedding = shape.hidden**0.5 if target.root_embedding else 1.0
    if not target.scales and not (_close(shape.embedding_scale, embedding) and shape.residual_scale == 1):
        yield "has no factors of embedding and residual stream"
    if target.logit_scale is None and found.logit_scale != 1:
        yield f"does not multiply logits, the model by {found.logit_scale:.4g}"
    for part, softcap in {"attention": mixer.softcap, "logits": shape.logit_softcap}.items():
        if softcap and part not in target.softcap:
            yield f"has no softcap of {part}"
    if target.biases and not config.get("attention_bias", True):
        yield "has biases of attention, the model none"
    if config.get("clip_qkv") is not None:
        yield "is not told to clamp queries, keys and values (clip_qkv)"
    yield from _shared_differences(found)
    yield from _mixture_differences(target, found)


def _shared_differences(found: Description) -> Iterator[str]:
    """Of keys and values that several layers attend to, and of inputs of every layer's own."""
    shape, own = found.shape, len(found.shape.cached)
    for index, mixer in enumerate(shape.attentions):
        if mixer.shared_with is not None and mixer.shared_with != shared_layer(own, window=mixer.window is not None):
            yield f"lets layer {index} attend to the keys and values of another layer than {mixer.shared_with}"
            return
    if shape.inputs is not None and shape.inputs.vocab != shape.vocab:
        yield f"has inputs of layers for each of {shape.vocab} tokens, the model for {shape.inputs.vocab}"


def _rotary_differences(target: Target, found: Description) -> Iterator[str]:
    whole, slid = rotary_of(found)
    if whole["rope_type"] not in target.rotary:
        yield f"has no rotary settings of type {whole['rope_type']!r}"
    if not target.windows and whole != slid:
        yield "has one kind of rotary settings, the model two"
    if target.windows and slid["rope_type"] != "default" and (whole != slid or slid["rope_type"] == "proportional"):
        yield "does not scale the angles of layers with a window"
    if rounds_ramp(found) and not target.rounded_ramp:
        yield "rounds the bounds of yarn's ramp, the model does not"


def _mixture_differences(target: Target, found: Description) -> Iterator[str]:
    mixtures = [layer.mixture for layer in found.shape.layers]
    if not any(mixtures):
        if not target.dense:
            yield "has experts, the model none"
        return
    first = next(mixture for mixture in mixtures if mixture is not None)
    dense = mixtures.index(first)
    if any(mixture != first for mixture in mixtures[dense:]) or (dense and target.experts != "said"):
        yield "has the same experts in every layer"
    if first.limit != target.limit:
        yield f"clips activations at {target.limit:g}, the model at {first.limit:g}"
    if target.experts != "said" and first.routing.normalize != (target.experts == "normalized"):
        scaled = "scales" if target.experts == "normalized" else "does not scale"
        yield f"{scaled} the chosen experts' weights to a sum of 1"


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)
