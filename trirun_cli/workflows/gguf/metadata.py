"""What a GGUF file says of a packed checkpoint."""

from __future__ import annotations

from typing import Any

from trirun_kernels.decoder.shape import GatedDelta
from trirun_kernels.weights.names import WEIGHT, embedding_names

from ...checkpoint.formats.gguf.targets import Target
from ...checkpoint.formats.gguf.tokenizer_metadata import tokenizer_metadata
from ...checkpoint.formats.gguf.types import ALIGNMENT, GgufType
from ...checkpoint.formats.gguf.writer import FILE_TYPES
from ...checkpoint.reader import Checkpoint
from ...errors import InputError
from ...models.description import Description, longest_context
from ...models.rotary import attention_factor, stretch
from .model import attentions_of, gguf_model, rotary_of

# Of positions of images in Qwen3.5, whose files must have them; a text's are all the same.
_SECTIONS = (11, 11, 10)
_SIGMOID = 2  # llama.cpp's number of a router's function


def gguf_metadata(checkpoint: Checkpoint, kind: GgufType, pre: str | None) -> dict[str, Any]:
    """What the file says of the model and its tokenizer.

    Raises:
        InputError: llama.cpp has no such model, or no such tokenizer.
    """
    config = checkpoint.config
    target, found = gguf_model(checkpoint)
    shape = found.shape
    _check_vocabulary(checkpoint, shape.vocab)
    numbers: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "context_length": _context(target, found, config),
        "embedding_length": shape.hidden,
        "block_count": len(shape.layers),
        # A mixture has none of its own; config.json still has its size, or that of an expert.
        "feed_forward_length": shape.layers[0].feed_forward.size or int(config["intermediate_size"]),
        f"attention.layer_norm{'_rms' if shape.norm == 'rms' else ''}_epsilon": float(shape.norm_eps),
    }
    numbers |= _attention_numbers(found) | (_own_numbers(found) if target.own_sizes else {})
    numbers |= _rotary_numbers(target, found)
    numbers |= _window_numbers(target, found) | _scale_numbers(target, found) | _mixture_numbers(target, found)
    numbers |= _delta_numbers(found)
    head: dict[str, Any] = {
        "general.architecture": target.architecture,
        "general.type": "model",
        "general.name": checkpoint.path.resolve().name,
        "general.file_type": FILE_TYPES[kind.name],
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
    }
    own = {f"{target.architecture}.{key}": value for key, value in numbers.items()}
    return head | own | tokenizer_metadata(checkpoint.path, config, pre)


def _check_vocabulary(checkpoint: Checkpoint, vocab: int) -> None:
    """That the embedding has as many rows as config.json says: every row gets a token in the file."""
    name, _ = embedding_names(checkpoint.config, checkpoint)
    module = name.removesuffix(WEIGHT)
    shape = checkpoint.shape(module) if module in checkpoint.modules else checkpoint[name].shape
    if shape[:1] != (vocab,):
        raise InputError(f"{checkpoint.path}: {name} has shape {list(shape)}, config.json says {vocab} rows")


def _context(target: Target, found: Description, config: dict[str, Any]) -> int:
    """Positions that the file has. Within a window attention is plain, which llama.cpp's model may not have."""
    windows = () if target.windows else found.shape.windows
    return min(longest_context(config), *(window or 2**40 for window in (None, *windows)))


def _attention_numbers(found: Description) -> dict[str, Any]:
    whole, _ = attentions_of(found)
    return {
        "attention.head_count": whole.heads,
        "attention.head_count_kv": _number([each.kv_heads for each in found.shape.attentions]),
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
    }


def _own_numbers(found: Description) -> dict[str, Any]:
    """Of layers with sizes of their own."""
    shape, (_, slid) = found.shape, attentions_of(found)
    return {
        "feed_forward_length": _number([layer.feed_forward.size for layer in shape.layers]),
        "attention.key_length_swa": slid.head_dim,
        "attention.value_length_swa": slid.head_dim,
        "rope.dimension_count_swa": 2 * slid.rotary_half,
        "attention.shared_kv_layers": len(shape.layers) - len(shape.cached),
        "embedding_length_per_layer_input": 0 if shape.inputs is None else shape.inputs.size,
    }


def _number(values: list[int]) -> int | list[int]:
    """What every layer has: one number where it is the same."""
    return values if len(set(values)) > 1 else values[0]


def _rotary_numbers(target: Target, found: Description) -> dict[str, Any]:
    whole, slid = rotary_of(found)
    numbers: dict[str, Any] = {
        "rope.dimension_count": 2 * attentions_of(found)[0].rotary_half,
        "rope.freq_base": float(whole["rope_theta"]),
    }
    if target.windows:
        numbers["rope.freq_base_swa"] = float(slid["rope_theta"])
    kind, trained = whole["rope_type"], whole.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        numbers |= {"rope.scaling.type": kind, "rope.scaling.factor": stretch(whole)}
    if kind in ("yarn", "longrope") and trained:
        numbers["rope.scaling.original_context_length"] = int(trained)
    if kind == "yarn":
        named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        numbers |= {f"rope.scaling.{key}": float(whole[name]) for name, key in named.items() if whole.get(name)}
    # llama.cpp multiplies what it makes of yarn's factor itself by this.
    usual = attention_factor({**whole, "attention_factor": None, "mscale": None}) if kind == "yarn" else 1.0
    if (own := attention_factor(whole)) != usual:
        numbers["rope.scaling.attn_factor"] = own / usual
    sections = whole.get("mrope_section") or _SECTIONS
    if target.architecture.startswith("qwen35"):
        numbers["rope.dimension_sections"] = [*map(int, sections[:3]), 0]
    return numbers


def _window_numbers(target: Target, found: Description) -> dict[str, Any]:
    if not target.windows or not any(found.shape.windows):
        return {}
    windows = found.shape.windows
    return {
        "attention.sliding_window": next(filter(None, windows)),
        "attention.sliding_window_pattern": [window is not None for window in windows],
    }


def _scale_numbers(target: Target, found: Description) -> dict[str, Any]:
    """Factors and softcaps."""
    shape, (mixer, _) = found.shape, attentions_of(found)
    numbers: dict[str, Any] = {}
    if target.scales:
        numbers |= {"attention.scale": mixer.scale, "embedding_scale": shape.embedding_scale}
        numbers["residual_scale"] = shape.residual_scale
    if target.logit_scale is not None:
        numbers["logit_scale"] = found.logit_scale if target.logit_scale == "multiplied" else 1 / found.logit_scale
    if "attention" in target.softcap:
        numbers["attn_logit_softcapping"] = mixer.softcap
    if "logits" in target.softcap:
        numbers["final_logit_softcapping"] = shape.logit_softcap
    return {name: float(value) for name, value in numbers.items()}


def _mixture_numbers(target: Target, found: Description) -> dict[str, Any]:
    """What the file says of a mixture of experts; nothing of another model."""
    layers = found.shape.layers
    dense, mixture = next(((i, each.mixture) for i, each in enumerate(layers) if each.mixture), (0, None))
    if mixture is None:
        return {}
    routing = mixture.routing
    numbers: dict[str, Any] = {
        "expert_count": routing.experts,
        "expert_used_count": routing.top_k,
        "expert_feed_forward_length": mixture.size,
    }
    if mixture.shared_gate:
        numbers["expert_shared_feed_forward_length"] = layers[-1].feed_forward.size
    if target.experts != "said":
        return numbers
    return numbers | {
        "expert_shared_count": layers[-1].feed_forward.size // mixture.size,
        "leading_dense_block_count": dense,
        "expert_weights_scale": float(routing.scale),
        "expert_weights_norm": routing.normalize,
        "expert_gating_func": _SIGMOID,
        "expert_group_count": routing.groups,
        "expert_group_used_count": routing.top_groups,
    }


def _delta_numbers(found: Description) -> dict[str, Any]:
    """What the file says of Gated DeltaNet; nothing of a model without it."""
    if not found.shape.deltas:
        return {}
    mixer = found.shape.deltas[0]
    return {
        "ssm.conv_kernel": mixer.taps,
        "ssm.state_size": mixer.key_dim,
        "ssm.group_count": mixer.key_heads,
        "ssm.time_step_rank": mixer.value_heads,
        "ssm.inner_size": mixer.values,
        "attention.recurrent_layers": [isinstance(layer.mixer, GatedDelta) for layer in found.shape.layers],
    }
