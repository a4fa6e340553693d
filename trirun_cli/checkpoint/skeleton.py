"""The shape of a model without its weights."""

from __future__ import annotations

from typing import Any

from ..errors import as_input_error
from .model_dir import ModelDir


def build(source: ModelDir) -> Any:
    """The transformers model of a directory's config, on the meta device: modules and shapes, no memory;
    the experts of a mixture as layers of their own.

    Raises:
        InputError: transformers knows no causal language model of this kind.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trirun_kernels.weights.experts import separate_experts

    section = {key: value for key, value in source.config.items() if key != "quantization_config"}
    with as_input_error(source.path), torch.device("meta"):
        return separate_experts(AutoModelForCausalLM.from_config(AutoConfig.for_model(**section)))


def linear_modules(model: Any) -> dict[str, tuple[int, int]]:
    """Every ``nn.Linear`` of a model: module name to (n, k)."""
    from torch import nn

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
