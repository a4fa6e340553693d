"""Training after all blocks are quantized: scales, then codes, against the original model end to end."""
