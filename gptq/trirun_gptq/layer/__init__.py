"""One matrix: from float weights and the statistics of its inputs to codes and scales.

Begin with ``gptq.py``, which runs the steps in order: ``hessian.py``, ``scale_search.py``, GPTQ itself,
``coordinate_descent.py``. The innermost loops are ``loops_torch.py``, the reference, and ``loops_triton.py`` for
GPUs; ``quantized.py`` is the result.
"""
