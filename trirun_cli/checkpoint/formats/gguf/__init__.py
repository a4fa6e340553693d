"""GGUF, the format of llama.cpp and its kin: a model with config and tokenizer in one file.

:mod:`.file` reads and checks the file, :mod:`.blocks` and :mod:`.floats` decode its tensors, :mod:`.model` says which
models' they are and what these are called in transformers, :mod:`.tokenizer` makes a tokenizer.json of the metadata.
:class:`~.source.GgufModel` puts them together: what ``trirun pack`` reads.
"""
