"""Weights: the grid (``QuantSpec``), the tile64 layout and packing; tensor names and safetensors directories."""
