"""What of a model's layers is stored, by the names of the tensors alone."""

from __future__ import annotations

import re
from collections.abc import Collection

from .llama_config import UnsupportedModel

_NORM_OR_BIAS = re.compile(r"model\.layers\.\d+\.(.+(?:norm\.weight|\.bias))")


def check_layers_alike(names: Collection[str], layers: int) -> None:
    """That a norm or a bias which any layer has among the tensors of these names, each of the first ``layers`` has.

    Raises:
        UnsupportedModel: naming one that is missing.
    """
    found = {matched[1] for name in names if (matched := _NORM_OR_BIAS.fullmatch(name))}
    for name in (f"model.layers.{i}.{part}" for part in sorted(found) for i in range(layers)):
        if name not in names:
            raise UnsupportedModel(f"there is no tensor {name}, which other layers have")
