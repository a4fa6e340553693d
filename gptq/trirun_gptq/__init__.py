"""Turning the linear layers of a trained model into 2-bit or ternary codes.

Begin with ``pipeline.py``, the walk over a model, which reads each block (``model/``), solves its layers
(``layer/``), trains it (``block/``) and then the whole model (``whole/``); ``recipe.py`` is every choice of such a
run. ``lossless/`` finds the codes of a model that is ternary already, ``train/`` finetunes a model on its grid,
``run/`` is what all of them share. Nothing here prints: progress goes to a callback, tensors to a writer.
"""
