"""One decoder block: its matrices quantized in the order in which they run, then its codes and scales trained together
to rebuild the block's output.

Begin with ``walk.py``; ``statistics.py`` collects what its layers read, ``reconstruct.py`` trains, by one of the two
methods of ``trainable.py``; ``optim.py`` and ``cuda_graph.py`` make its steps.
"""
