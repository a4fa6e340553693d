"""Models in transformers' own modelling: loading one, and what its cache of keys and values can do."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from trirun_gptq.model.mxfp4 import QUANT_METHOD as MXFP4

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import QUANT_METHOD
from ...errors import InputError
from ...integrations.transformers import load

# What a model's forward calls it: of attention, before transformers 5.24 and since; of recurrent layers alone.
CACHES = ("past_key_values", "cache", "cache_params")


def load_transformers(source: ModelDir, device: str, dtype: torch.dtype | None, act_bits: int | None) -> Any:
    """A model directory, packed or not, in transformers' own modelling.

    Args:
        device: of torch. dtype: None is float32 on the CPU, the checkpoint's own on a GPU.
        act_bits: of packed layers, 8 or 16; None takes the checkpoint's.

    Raises:
        InputError: it cannot be loaded.
    """
    if source.quant_method not in (QUANT_METHOD, MXFP4, None):
        reason = f"is quantized by {source.quant_method!r}; trirun runs its own format and plain models"
        raise InputError(f"{source.path} {reason}")
    model = load(source.path, device=device, dtype=dtype)
    if act_bits is not None and source.quant_method is not None:
        _set_act_bits(model, act_bits)
    return model


def cache_argument(model: Any) -> str:
    """What the forward of a transformers model calls its cache, and so does its output.

    Raises:
        InputError: it takes none.
    """
    known = signature(model.forward).parameters
    cache = next((name for name in CACHES if name in known), None)
    if cache is None:
        raise InputError(f"{type(model).__name__} has no cache of its past, by which trirun runs models")
    return cache


def first_positions(cache: Any, length: int) -> Any:
    """A transformers cache that keeps every token, cut to its first ``length`` positions; None for none."""
    if length == 0:
        return None
    for layer in cache.layers:
        # Layers that share another layer's keys hold none of their own.
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return cache


def longest_sequence(config: Any) -> int:
    """Positions that a model runs on, by transformers' configuration of its text: its own, of LongRoPE those of its
    first training. With a token beyond these, transformers turns every key of a forward pass by other angles than the
    keys that are in the cache by then."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary, *(kind for kind in rotary.values() if isinstance(kind, dict))]  # one for all layers, or by type
    trained = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return int(min(filter(None, [getattr(config, "max_position_embeddings", None), *trained, 2**31])))


def keeps_every_token(model: Any) -> bool:
    """Whether the cache of a transformers model can go back to any of its tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if getattr(model, "_is_stateful", False):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@torch.inference_mode()
def continues(model: Any, cache: str) -> bool:
    """Whether several tokens may follow others that are in the cache. Some recurrent layers begin anew with more than
    one, whatever their state: what a model with a state does is tried here, before it is relied on.

    Args:
        cache: what the model's forward calls its cache.

    Raises:
        InputError: it gives back none, or does not run with one.
    """
    if not getattr(model, "_is_stateful", False):
        return True
    tokens = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        past = returned_cache(model, model(input_ids=tokens[:, :4], use_cache=True), cache)
        rest = model(input_ids=tokens[:, 4:], use_cache=True, **{cache: past}).logits.float()
        whole = model(input_ids=tokens, use_cache=True).logits[:, 4:].float()
    # As of Kimi Linear without a layer of attention, whose cache transformers cannot ask for its length.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"transformers does not run this {type(model).__name__} with a cache: {reason}") from error
    rounding = 3e-5 if model.dtype == torch.float32 else 3e-2
    return float((rest - whole).norm()) <= rounding * float(whole.norm())


def returned_cache(model: Any, output: Any, cache: str) -> Any:
    """The cache in a model's output.

    Raises:
        InputError: there is none, as of models that keep one past within themselves: it could not be each slot's.
    """
    past = output.get(cache)
    if past is None:
        raise InputError(f"{type(model).__name__} gives back no cache of its past, by which trirun runs models")
    return past


def _set_act_bits(model: Any, act_bits: int) -> None:
    from trirun_kernels.gemm.linear import Int2Linear

    # As in the native decoder, the head reads 16 bits.
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, Int2Linear) and module is not head:
            module.act_bits = act_bits
