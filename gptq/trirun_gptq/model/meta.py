"""The empty model of a directory: what transformers builds from its config.json, without any weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from trirun_kernels.weights.experts import with_linear_layers

from ..errors import QuantizationError


def meta_model(path: str | Path) -> Any:
    """The causal language model of a directory's config.json, in eval mode.

    Parameters lie on the meta device, in float32: they have shapes and no memory. Buffers, such as rotary tables, are
    real. Fused experts and GPT-2's layers are linear layers
    (:func:`~trirun_kernels.weights.experts.with_linear_layers`). A ``quantization_config`` changes nothing: linear
    layers have the shapes of the model before quantization.

    Raises:
        QuantizationError: the directory has no config.json, or transformers makes no causal language model of it.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise QuantizationError(f"{path} has no config.json")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            model = auto_class(config).from_config(config, dtype=torch.float32)
    except MemoryError:
        raise
    except Exception as error:
        # What transformers raises of a config.json that does not fit is of no kind in particular.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise QuantizationError(f"{path} cannot be loaded as a causal language model: {reason[:300]}") from error
    return with_linear_layers(model).eval().requires_grad_(False)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a language model of a config: ``AutoModelForCausalLM``, but for some models
    that also see, which are no causal language models to transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if causal or not hasattr(config, "text_config") else AutoModelForImageTextToText


def linear_modules(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Every ``nn.Linear`` of a model: module name to (n, k), its out_features and in_features."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
