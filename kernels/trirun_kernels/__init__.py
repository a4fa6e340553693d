"""2-bit weights: the grid, the tile64 layout, packing, and matrix products on CPU and CUDA kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .weights.packing import PackedWeight, dequantize, pack, unpack
    from .weights.shapes import PackError
    from .weights.spec import QuantSpec

__all__ = ["PackError", "PackedWeight", "QuantSpec", "dequantize", "pack", "unpack"]


def __getattr__(name: str) -> Any:
    # On first use, so that the grid and the native decoder are there without torch, whose import takes seconds.
    if name in __all__:
        place = {"QuantSpec": ".weights.spec", "PackError": ".weights.shapes"}.get(name, ".weights.packing")
        return getattr(import_module(place, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
