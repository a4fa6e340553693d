"""2-bit weights: the grid, the tile64 layout, packing, and matrix products on CPU and CUDA kernels."""

from .packing import PackedWeight, PackError, dequantize, pack, unpack
from .spec import QuantSpec

__all__ = ["PackError", "PackedWeight", "QuantSpec", "dequantize", "pack", "unpack"]
