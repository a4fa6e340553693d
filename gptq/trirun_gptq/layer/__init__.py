"""One matrix: its Hessian, its scales, GPTQ, coordinate descent, and the loops of both in torch and Triton."""
