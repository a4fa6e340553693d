"""The matrices and decoders that benchmarks and tests share (configs/shapes.yaml)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..resources import configs_dir

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import DecoderShape

AS_LLAMA = "-as-llama"  # behind a decoder's name


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear layer: ``n`` = out_features, ``k`` = in_features, and where it comes from."""

    n: int
    k: int
    label: str

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


def load_shapes() -> dict[str, list[Shape]]:
    """Every named list of configs/shapes.yaml: "default", "cpu" and one per model."""
    import yaml

    document = yaml.safe_load((configs_dir() / "shapes.yaml").read_text())
    lists = {name: [Shape(n, k, f"{n}x{k}") for n, k in document[name]] for name in ("default", "cpu")}
    for model, layers in document["models"].items():
        lists[model] = [Shape(n, k, f"{model} {layer}") for layer, (n, k) in layers.items()]
    return lists


def parse_shapes(text: str | None, default: str) -> list[Shape]:
    """``--shapes``: a comma-separated mix of list names and NxK, without repeats; None gives the list ``default``.

    Raises:
        UsageError: a word is neither, or a size is not positive.
    """
    lists = load_shapes()
    chosen: dict[tuple[int, int], Shape] = {}
    for word in (default if text is None else text).split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", word.strip())
        if match and int(match[1]) > 0 and int(match[2]) > 0:
            found = [Shape(int(match[1]), int(match[2]), word.strip())]
        elif word.strip() in lists:
            found = lists[word.strip()]
        else:
            raise UsageError(f"--shapes {word.strip()}: neither NxK nor one of {', '.join(lists)}")
        for shape in found:
            chosen.setdefault((shape.n, shape.k), shape)
    return list(chosen.values())


def load_decoder_sizes() -> dict[str, dict[str, Any]]:
    """The decoders of configs/shapes.yaml by name: arguments of ``DecoderShape.uniform``, or a config.json."""
    import yaml

    return yaml.safe_load((configs_dir() / "shapes.yaml").read_text())["decoders"]


def load_decoder_shapes() -> dict[str, DecoderShape]:
    """The decoders of configs/shapes.yaml by name."""
    from trirun_kernels.decoder.shape import DecoderShape

    from ..models.description import decoder_shape

    return {
        name: decoder_shape(sizes) if "model_type" in sizes else DecoderShape.uniform(**sizes)
        for name, sizes in load_decoder_sizes().items()
    }


def decoder_shape_named(name: str) -> DecoderShape:
    """The decoder of that name, or with :data:`AS_LLAMA` behind it the Llama of its size.

    Raises:
        UsageError: there is none.
    """
    shapes = load_decoder_shapes()
    base = name.removesuffix(AS_LLAMA)
    if base not in shapes:
        raise UsageError(f"--shape {name}: not one of {', '.join(shapes)}")
    return shapes[base] if base == name else as_llama(shapes[base])


def as_llama(shape: DecoderShape) -> DecoderShape:
    """A Llama of a decoder's size: its layers, hidden size and vocabulary, everywhere the heads of its last attention,
    and as feed-forward part what one token reads: of a mixture the experts that it goes to."""
    from trirun_kernels.decoder.shape import Attention, DecoderShape

    heads = next(layer.mixer for layer in reversed(shape.layers) if isinstance(layer.mixer, Attention))
    layer = shape.layers[-1]
    experts = 0 if layer.mixture is None else layer.mixture.size * layer.mixture.routing.top_k
    return DecoderShape.uniform(
        layers=len(shape.layers), hidden=shape.hidden, ffn=experts + layer.feed_forward.size, heads=heads.heads,
        kv_heads=heads.kv_heads, head_dim=heads.head_dim, vocab=shape.vocab,
    )  # fmt: skip
