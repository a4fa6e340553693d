"""Weights that are ternary already: found in floats, or read from packed formats, without any loss."""
