"""One decoder block: quantizing its matrices in order, then training its scales and codes to rebuild its output."""
