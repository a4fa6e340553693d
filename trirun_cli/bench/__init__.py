"""The benchmarks of ``trirun bench``. Each checks results first and then times them.

:mod:`.kernels` times products of the shapes in :mod:`.shapes` beside their :mod:`.peers`, :mod:`.f16acc` the
fp16-accumulating product, :mod:`.models` whole models (its :mod:`.contestants`), and :mod:`.serve` a server under load
(through its :mod:`.client`). Begin with :mod:`.timing`, which says how a call is timed.
"""
