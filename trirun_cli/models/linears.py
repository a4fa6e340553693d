"""Which linear layers a model has, by its config.json."""

from __future__ import annotations

from trirun_kernels.weights.names import HEAD_MODULE, LAYER_LINEARS, layer_prefix

from ..checkpoint.model_dir import ModelDir
from .llama_config import UnsupportedModel, decoder_shape


def linear_layers(model: ModelDir) -> dict[str, tuple[int, int]]:
    """Every linear layer of a model: module name to (n, k), its out_features and in_features.

    Of the families that the native decoder runs they follow from config.json; of others transformers builds the empty
    model.

    Raises:
        InputError: config.json is damaged. MissingError: transformers is needed and not installed.
    """
    try:
        shape = decoder_shape(model.config)
    except UnsupportedModel:
        # Here: it imports torch and transformers, which the families above need not have.
        from trirun_gptq.model.meta import linear_modules, meta_model

        return linear_modules(meta_model(model.path))
    layers = {
        layer_prefix(layer) + LAYER_LINEARS[name]: size
        for layer in range(shape.layers)
        for name, size in shape.linear_sizes.items()
    }
    return layers | {HEAD_MODULE: (shape.vocab, shape.hidden)}
