"""Quantization-aware training: a whole model's 2-bit or ternary weights trained end to end against the original."""
