"""Which linear layers a model has, by its config.json."""

from __future__ import annotations

from trirun_kernels.weights.names import EMBEDDING_MODULE, HEAD_MODULE, PREFIX, WEIGHT, layer_prefix

from ..checkpoint.model_dir import ModelDir
from .description import Description, UnsupportedModel, description
from .settings import text_settings


def linear_layers(model: ModelDir) -> dict[str, tuple[int, int]]:
    """Every linear layer of a model: module name to (n, k), its out_features and in_features.

    Of the families that the native decoder runs they follow from config.json; of others transformers builds the empty
    model.

    Raises:
        InputError: config.json is damaged. MissingError: transformers is needed and not installed.
    """
    try:
        found = _text_model(model)
    except UnsupportedModel:
        # Here: it imports torch and transformers, which the families above need not have.
        from trirun_gptq.model.meta import linear_modules, meta_model

        return linear_modules(meta_model(model.path))
    return described_layers(found) | {HEAD_MODULE: (found.shape.vocab, found.shape.hidden)}


def described_layers(found: Description) -> dict[str, tuple[int, int]]:
    """:func:`linear_layers` of a description, without the output head."""
    shape, layers = found.shape, dict[str, tuple[int, int]]()
    for index, layer in enumerate(shape.layers):
        sizes, names = layer.linear_sizes(shape.hidden), found.names.of(layer)
        fused = {name: module for module, parts in names.fused.items() for name in parts}
        for name, (n, k) in sizes.items():
            module = layer_prefix(index) + (fused.get(name) or names.linears[name])
            joined = name in fused and module in layers
            layers[module] = (layers[module][0] + n if joined else n, k)
        for module, n in names.gates.items():
            layers[layer_prefix(index) + module] = (n, shape.hidden)
        if layer.mixture is not None:
            of_expert = layer.mixture.linear_sizes(shape.hidden)
            for module in names.mixture.modules(layer.mixture):
                layers[layer_prefix(index) + module] = of_expert[module.rpartition(".")[2]]
            if names.mixture.linear_router:
                router = names.mixture.router.removesuffix(WEIGHT)
                layers[layer_prefix(index) + router] = (layer.mixture.routing.experts, shape.hidden)
            if names.mixture.shared_gate is not None:
                layers[layer_prefix(index) + names.mixture.shared_gate] = (1, shape.hidden)
    if shape.inputs is not None:
        layers[PREFIX + found.names.inputs["projection"]] = (len(shape.layers) * shape.inputs.size, shape.hidden)
    return layers


def embedding(model: ModelDir) -> dict[str, tuple[int, int]]:
    """The embedding of a model: its module's name to (vocabulary, hidden size); see :func:`linear_layers`."""
    try:
        shape = _text_model(model).shape
    except UnsupportedModel:
        from trirun_gptq.model.meta import meta_model

        skeleton = meta_model(model.path)
        table = skeleton.get_input_embeddings()
        return {name: tuple(module.weight.shape) for name, module in skeleton.named_modules() if module is table}
    return {EMBEDDING_MODULE: (shape.vocab, shape.hidden)}


def _text_model(model: ModelDir) -> Description:
    """What a model is made of that is a language model and nothing else.

    Raises:
        UnsupportedModel: the native decoder does not run it, or there are parts that see or hear beside it.
    """
    if text_settings(model.config) is not model.config or "vision_config" in model.config:
        raise UnsupportedModel("a model that sees or hears too")
    return description(model.config)
