"""A model as the quantizer reads it, one block in memory at a time.

Begin with ``loader.py``; ``activations.py`` holds what flows between the blocks, ``inputs.py`` finds what the layers
of a block read, ``experts.py`` knows where the tensors of a mixture of experts lie, ``writer.py`` hands finished
tensors over.
"""
