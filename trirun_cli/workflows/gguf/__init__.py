"""A packed checkpoint as one GGUF file.

:mod:`.metadata` says what the file says, and refuses what llama.cpp computes otherwise; :mod:`.places` has the place of
every tensor; :mod:`.tensors` makes their data.
"""
