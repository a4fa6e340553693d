"""Quantization-aware training: a whole model's 2-bit or ternary weights trained end to end against the original.

Begin with ``model.py``, a whole run, and ``layers.py``, the linear layers on their grid; ``loop.py`` takes the steps,
``losses.py``, ``data.py`` and ``generate.py`` are what they learn from, ``start.py`` is where they begin,
``state.py`` what is on disk.
"""
