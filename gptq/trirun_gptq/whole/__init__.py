"""Training after all blocks are quantized: the scales, then the codes too, of the whole model against the original's
predictions.

Begin with ``training.py``; ``layers.py`` are its linear layers, ``head.py`` computes and compares predictions.
"""
