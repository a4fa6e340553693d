"""A packed checkpoint as one GGUF file.

:mod:`.model` has llama.cpp's model, and refuses what that computes otherwise; :mod:`.metadata` says what the file says;
:mod:`.places` has the place of every tensor; :mod:`.tensors` makes their data.
"""
