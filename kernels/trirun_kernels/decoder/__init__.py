"""The native decoder: a whole transformer on CPU or CUDA kernels, its weights, and its reference."""
