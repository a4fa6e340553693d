"""Packed weights: the grid (``QuantSpec``), the tile64 layout, packing and unpacking. Needs torch for tensors only."""
